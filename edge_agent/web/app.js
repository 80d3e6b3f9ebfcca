// The page's start: language, theme, tabs, then the parts.
import { getJson } from "/web/api.js";
import { Device } from "/web/device.js";
import { $ } from "/web/dom.js";
import { Explore } from "/web/explore.js";
import { currentLanguage, switchLanguage, t, translatePage } from "/web/i18n.js";
import { Race } from "/web/race.js";

const THEMES = ["auto", "light", "dark"];
const STORE = "souschef.theme";
let theme = new URLSearchParams(location.search).get("theme") ?? localStorage.getItem(STORE) ?? "auto";

function applyTheme() {
  if (!THEMES.includes(theme)) theme = "auto";
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = t(`theme_${theme}`);
}

function labelLanguage() {
  const other = currentLanguage() === "en" ? { lang: "zh", name: "中文" } : { lang: "en", name: "English" };
  $("language").textContent = other.name;
  $("language").lang = other.lang;
  applyTheme();
}

function setUpTabs() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const select = (tab, focus) => {
    for (const other of tabs) {
      other.setAttribute("aria-selected", String(other === tab));
      other.tabIndex = other === tab ? 0 : -1;
      $(other.getAttribute("aria-controls")).hidden = other !== tab;
    }
    if (focus) tab.focus();
    history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`);
  };
  tabs.forEach((tab, index) => {
    tab.addEventListener("click", () => select(tab, false));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) select(tabs[(index + step + tabs.length) % tabs.length], true);
    });
  });
  const asked = tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash);
  if (asked) select(asked, false);
}

function report(error) {
  $("failure").hidden = error === null;
  $("failure").textContent = error ? t("failed", { message: error.message }) : "";
}

async function start() {
  $("language").addEventListener("click", switchLanguage);
  $("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem(STORE, theme);
    applyTheme();
  });
  document.addEventListener("souschef:language", labelLanguage);
  setUpTabs();
  translatePage();
  try {
    const facts = await getJson("/demo/facts");
    $("model").textContent = facts.draft ? `${facts.model} + ${facts.draft}` : facts.model;
    new Race(facts, report);
    new Explore(facts);
    const device = new Device(facts, report);
    translatePage();
    device.follow();
  } catch (error) {
    report(error);
  }
}

start();
