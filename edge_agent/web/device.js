// The device: what it reads now, how the policy answers, and sliders that play its sensors.
import { events, getJson, postJson } from "/web/api.js";
import { $, h, svg } from "/web/dom.js";
import { number, t } from "/web/i18n.js";
import { legend, tokenSpan } from "/web/lane.js";

const MODES = ["local_speculative", "local_direct", "cloud_verify", "cloud_generate"];
const PUSH_MS = 400;
const RETRY_MS = 2000;
const PUSHES_AFTER_A_CHANGE = 6;
const STRIP = { width: 1000, height: 96 };
const PRESETS = {
  preset_cool: { temperature: 28, battery: 95 },
  preset_warm: { temperature: 41.5, battery: 70 },
  preset_hot: { temperature: 44.5, battery: 60 },
  preset_empty: { temperature: 33, battery: 6 },
};

export class Device {
  constructor(facts, report) {
    this.facts = facts;
    this.report = report;
    this.state = null;
    this.rounds = [];
    this.abort = null;
    this.pending = 0;
    $("device-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.abort) this.abort.abort();
      else this.start();
    });
    for (const id of ["drive-temperature", "drive-battery", "drive-charging", "drive-saver"]) {
      $(id).addEventListener("input", () => this.drive());
    }
    $("profile").addEventListener("change", () => this.useProfile());
    document.addEventListener("souschef:language", () => this.label());
    this.label();
    this.loadProfiles();
  }

  label() {
    $("presets").replaceChildren(
      ...Object.entries(PRESETS).map(([key, values]) => h("button", { type: "button", class: "chip", id: key, onclick: () => this.usePreset(values) }, t(key))),
    );
    const prompt = $("device-prompt");
    if (!prompt.value || prompt.value === this.prefilled) prompt.value = this.prefilled = t("device_prompt");
    $("device-start").textContent = t(this.abort ? "device_running" : "device_start");
    legend($("device-legend"), ["draft", "target", "cloud"]);
    this.labelSliders();
    this.draw();
    if (this.rounds.length) this.drawRun();
  }

  /** Follows the state stream while the page is looked at; nothing runs for a hidden page. */
  async follow() {
    for (;;) {
      if (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
      const leaving = new AbortController();
      const leave = () => document.hidden && leaving.abort();
      document.addEventListener("visibilitychange", leave);
      try {
        for await (const event of events("/demo/state", { signal: leaving.signal })) {
          this.state = event;
          this.draw();
        }
      } catch (error) {
        if (error.name !== "AbortError") {
          this.state = null;
          this.draw();
        }
      } finally {
        document.removeEventListener("visibilitychange", leave);
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  draw() {
    const device = this.state?.device;
    const policy = this.state?.policy;
    const link = this.state?.link;
    const known = (value, digits, unit) => (value === null || value === undefined ? t("unknown") : `${number(value, digits)}${unit}`);
    const charger = device?.charging === true ? ` · ${t("on_charger")}` : device?.charging === false ? ` · ${t("on_battery")}` : "";
    const tiles = [
      ["temperature", known(device?.temperature_c, 1, " °C")],
      ["battery", `${known(device?.battery_percent, 0, " %")}${charger}`],
      ["headroom", known(device?.headroom, 2, "")],
      ["gamma", policy?.mode ? number(policy.gamma) : "–"],
      ["link", t(linkWord(link))],
    ];
    $("tiles").replaceChildren(...tiles.map(([key, value]) => h("div", { "data-tile": key }, h("dt", {}, t(key)), h("dd", {}, value))));
    $("ladder").replaceChildren(
      ...MODES.map((mode) => h("li", { class: mode.startsWith("cloud") ? "in-cloud" : "on-device", "aria-current": mode === policy?.mode ? "true" : null, "data-mode": mode }, t(`mode_${mode}`))),
    );
    const reason = policy?.reason ? t(`reason_${policy.reason}`) : t("idle");
    if ($("reason").textContent !== reason) $("reason").textContent = reason;
  }

  async start() {
    this.report(null);
    this.rounds = [];
    $("device-empty").hidden = true;
    $("device-run").hidden = false;
    $("device-answer").replaceChildren();
    const body = {
      prompt: $("device-prompt").value,
      max_tokens: Number($("device-length").value),
      privacy: $("device-private").checked ? "on_device" : "standard",
    };
    this.abort = new AbortController();
    $("device-start").textContent = t("device_running");
    try {
      for await (const event of events("/demo/answer", { body, signal: this.abort.signal })) {
        if (event.type === "round") this.take(event);
      }
    } catch (error) {
      if (error.name !== "AbortError") this.report(error);
    } finally {
      this.abort = null;
      $("device-start").textContent = t("device_start");
    }
  }

  take(round) {
    this.rounds.push(round);
    const answer = $("device-answer");
    const following = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 40;
    answer.append(...round.tokens.map(tokenSpan));
    if (following) answer.scrollTop = answer.scrollHeight;
    // Drawn once a frame at most, however fast the rounds come.
    this.scheduled ??= requestAnimationFrame(() => {
      this.scheduled = null;
      this.drawRun();
    });
  }

  drawRun() {
    const segments = [];
    let position = 0;
    for (const round of this.rounds) {
      const last = segments.at(-1);
      if (!last || last.mode !== round.mode || last.reason !== round.reason || last.gamma !== round.gamma) {
        segments.push({ mode: round.mode, gamma: round.gamma, reason: round.reason, start: position, end: position });
      }
      position += round.tokens.length;
      segments.at(-1).end = position;
    }
    $("strip").replaceChildren(strip(segments, Math.max(position, 1)), modeLegend(segments));
    // A probe is one round long and comes back every few rounds: the list is about what lasts.
    const lasting = segments.filter((segment) => segment.reason !== "probe");
    const changed = lasting.filter((segment, index) => index === 0 || segment.mode !== lasting[index - 1].mode || segment.reason !== lasting[index - 1].reason);
    $("changes").replaceChildren(
      h("thead", {}, h("tr", {}, ...["at_token", "mode", "gamma", "why"].map((key) => h("th", { scope: "col", class: ["mode", "why"].includes(key) ? "words" : null }, t(key))))),
      h("tbody", {}, ...changed.slice(-40).map((segment) =>
        h("tr", { "data-mode": segment.mode, "data-reason": segment.reason }, h("td", {}, number(segment.start + 1)), h("td", { class: "words" }, t(`mode_${segment.mode}`)), h("td", {}, number(segment.gamma)), h("td", { class: "words" }, t(`reason_${segment.reason}`))))),
    );
  }

  usePreset(values) {
    $("drive-temperature").value = String(values.temperature);
    $("drive-battery").value = String(values.battery);
    $("drive-charging").checked = false;
    this.drive();
  }

  labelSliders() {
    $("temperature-value").textContent = `${number(Number($("drive-temperature").value), 1)} °C`;
    $("battery-value").textContent = `${number(Number($("drive-battery").value))} %`;
  }

  /** A change is sent a few times over: the policy takes no single reading's word for it. */
  drive() {
    this.labelSliders();
    this.pending = PUSHES_AFTER_A_CHANGE;
    this.timer ??= setInterval(() => this.push(), PUSH_MS);
  }

  async push() {
    if (this.pending <= 0) {
      clearInterval(this.timer);
      this.timer = null;
      return;
    }
    this.pending -= 1;
    const reading = {
      temperature_c: Number($("drive-temperature").value),
      battery_percent: Number($("drive-battery").value),
      charging: $("drive-charging").checked,
      power_saver: $("drive-saver").checked,
    };
    try {
      await postJson("/v1/device", reading);
      $("drive-note").textContent = t("drive_sent", { temperature: `${number(reading.temperature_c, 1)} °C`, battery: `${number(reading.battery_percent)} %` });
    } catch (error) {
      this.pending = 0;
      $("drive-note").textContent = t("drive_refused", { message: error.message });
    }
  }

  /** There are phones to choose from where the agent plays a simulated one. */
  async loadProfiles() {
    if (!this.facts.sensors.startsWith("simulated")) return;
    try {
      this.showProfiles(await getJson("/v1/device/profiles"));
    } catch (error) {
      this.report(error);
    }
  }

  showProfiles({ profiles, current }) {
    $("profiles").hidden = false;
    $("profile").replaceChildren(...profiles.map((name) => h("option", { value: name, selected: name === current }, name.replaceAll("_", " "))));
  }

  /** Another phone, cool and charged; what the sliders said is forgotten. */
  async useProfile() {
    this.pending = 0;
    try {
      this.showProfiles(await postJson("/v1/device/profile", { profile: $("profile").value }));
    } catch (error) {
      $("drive-note").textContent = t("drive_refused", { message: error.message });
    }
  }
}

function linkWord(link) {
  if (!link?.configured) return "link_none";
  if (link.healthy) return "link_up";
  return link.rtt_ms === null ? "link_new" : "link_down";
}

/** Bands for the ways of decoding, steps for gamma. */
function strip(segments, total) {
  const x = (position) => (position / total) * STRIP.width;
  const most = Math.max(4, ...segments.map((segment) => segment.gamma));
  const y = (gamma) => STRIP.height - 8 - (gamma / most) * (STRIP.height - 20);
  const bands = segments.map((segment) => svg("rect", { class: `band ${segment.mode}`, x: x(segment.start), y: 0, width: Math.max(x(segment.end) - x(segment.start), 0.5), height: STRIP.height }));
  const path = segments.map((segment, index) => `${index ? "L" : "M"}${x(segment.start)} ${y(segment.gamma)}H${x(segment.end)}`).join("");
  return svg("svg", { viewBox: `0 0 ${STRIP.width} ${STRIP.height}`, preserveAspectRatio: "none", role: "img", "aria-label": t("strip_device") }, ...bands, svg("path", { class: "gamma-line", d: path }));
}

function modeLegend(segments) {
  const modes = MODES.filter((mode) => segments.some((segment) => segment.mode === mode));
  return h("figcaption", { class: "legend" }, ...modes.map((mode) => h("span", { class: "key" }, h("span", { class: `swatch-box ${mode}`, "aria-hidden": true }), ` ${t(`mode_${mode}`)}`)), h("span", { class: "key" }, h("span", { class: "swatch-line", "aria-hidden": true }), " γ"));
}
