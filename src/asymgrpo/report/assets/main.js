document.addEventListener("DOMContentLoaded", () => {
  startTheme();
  const data = readJSON("report-data");
  if (data.tokens.length) startTokens(data.tokens);
  startCharts(data);
});
