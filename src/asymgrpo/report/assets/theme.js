// Light or dark: the system's choice until the reader makes one.

const themeListeners = [];

function colour(name) {
  const probe = document.getElementById("probe");
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function remember(key, value) {
  try { localStorage.setItem(key, value); } catch { /* storage may be off; the page works without */ }
}

function recall(key) {
  try { return localStorage.getItem(key); } catch { return null; }
}

function startTheme() {
  const button = document.getElementById("theme");
  const name = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  const changed = () => { name(); themeListeners.forEach((listener) => listener()); };
  const stored = recall("asymgrpo-theme");
  if (stored === "light" || stored === "dark") document.documentElement.dataset.theme = stored;
  name();
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    remember("asymgrpo-theme", document.documentElement.dataset.theme);
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}
