// The language in use, and the words in it.
import { STRINGS } from "/web/strings.js";

const STORE = "souschef.language";
let language = initial();

function initial() {
  const asked = new URLSearchParams(location.search).get("lang") ?? localStorage.getItem(STORE) ?? navigator.language;
  return asked.toLowerCase().startsWith("zh") ? "zh" : "en";
}

export function currentLanguage() {
  return language;
}

export function t(key, values = {}) {
  const text = STRINGS[language][key] ?? key;
  return text.replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
}

export function number(value, digits = 0) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return value.toLocaleString(language, { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function seconds(ms) {
  return ms < 1000 ? t("ms", { n: number(ms) }) : t("seconds", { n: number(ms / 1000, 2) });
}

/** Fills every element that names its words: data-t for the text, data-label for the accessible name. */
export function translatePage() {
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  for (const element of document.querySelectorAll("[data-t]")) element.textContent = t(element.dataset.t);
  for (const element of document.querySelectorAll("[data-label]")) element.setAttribute("aria-label", t(element.dataset.label));
  document.dispatchEvent(new Event("souschef:language"));
}

export function switchLanguage() {
  language = language === "en" ? "zh" : "en";
  localStorage.setItem(STORE, language);
  translatePage();
}
