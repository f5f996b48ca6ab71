document.addEventListener("DOMContentLoaded", () => {
  startTheme();
  const data = readJSON("report-data");
  const drawn = startCharts(data);
  if (data.tokens.length) startTokens(data.tokens);
  drawn.then(() => { document.documentElement.dataset.ready = "yes"; });
});
