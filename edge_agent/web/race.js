// The race: one prompt, two lanes, then both replayed on one clock.
import { AgentError, events } from "/web/api.js";
import { $, h } from "/web/dom.js";
import { number, seconds, t } from "/web/i18n.js";
import { Lane, legend } from "/web/lane.js";
import { RoundView } from "/web/round.js";

const NAMES = { private: "private_q" };
const EVEN = 0.03;

export class Race {
  constructor(facts, report) {
    this.facts = facts;
    this.report = report;
    this.lanes = {};
    this.abort = null;
    this.comparison = null;
    this.scenario = null;
    this.roundView = new RoundView($("round-view"));
    $("race-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.abort) this.abort.abort();
      else this.start();
    });
    $("prompt").addEventListener("input", () => this.choose(null));
    $("play").addEventListener("click", () => (this.frame ? this.pause() : this.play()));
    $("scrub").addEventListener("input", () => {
      this.pause();
      this.seek((Number($("scrub").value) / 1000) * this.lengthMs);
    });
    document.addEventListener("souschef:language", () => this.label());
    this.drawScenarios();
    this.choose(facts.scenarios.find((scenario) => scenario.category === "edit") ?? facts.scenarios[0]);
    this.label();
  }

  drawScenarios() {
    const seen = new Set();
    const shown = this.facts.scenarios.filter((scenario) => !seen.has(scenario.category) && seen.add(scenario.category));
    $("scenarios").replaceChildren(
      ...shown.map((scenario) => {
        const button = h("button", { type: "button", class: "chip", "data-category": scenario.category, "aria-pressed": "false", onclick: () => this.choose(scenario) });
        return button;
      }),
    );
  }

  choose(scenario) {
    this.scenario = scenario;
    if (scenario) $("prompt").value = scenario.text;
    for (const button of $("scenarios").children) {
      button.setAttribute("aria-pressed", String(scenario !== null && button.dataset.category === scenario.category));
    }
    const note = scenario?.on_device ? "note_on_device" : scenario?.prediction ? "note_prediction" : null;
    $("scenario-note").hidden = note === null;
    $("scenario-note").textContent = note ? t(note) : "";
  }

  label() {
    for (const button of $("scenarios").children) button.textContent = t(NAMES[button.dataset.category] ?? button.dataset.category);
    if (this.scenario) this.choose(this.scenario);
    $("start").textContent = t(this.abort ? "stop" : "start");
    legend($("legend"), ["draft", "target", "rejected"]);
    this.labelPlay();
    for (const lane of Object.values(this.lanes)) lane.label();
    this.roundView.draw();
    if (this.finished) this.showResult();
  }

  async start() {
    this.reset();
    const body = {
      prompt: $("prompt").value,
      max_tokens: Number($("length").value),
      temperature: Number($("temperature").value),
      speculation: $("speculation").value,
      ...(this.scenario?.prediction ? { prediction: this.scenario.prediction } : {}),
      ...(this.scenario?.on_device ? { privacy: "on_device" } : {}),
    };
    this.abort = new AbortController();
    $("start").textContent = t("stop");
    $("headline").replaceChildren(h("p", { class: "progress" }, t("warming")));
    try {
      for await (const event of events("/demo/race", { body, signal: this.abort.signal })) this.take(event);
      if (!this.finished) throw new AgentError(t("offline"), 0);
    } catch (error) {
      if (error.name !== "AbortError") this.report(error);
      if (!this.finished) $("headline").replaceChildren();
    } finally {
      this.abort = null;
      $("start").textContent = t("start");
    }
  }

  reset() {
    this.pause();
    this.report(null);
    this.finished = false;
    this.comparison = null;
    $("race-empty").hidden = true;
    $("race-result").hidden = false;
    for (const id of ["player", "numbers", "round-view"]) $(id).hidden = true;
    this.lanes = {
      direct: new Lane("direct"),
      speculative: new Lane("speculative", (index) => this.roundView.pick(index)),
    };
    $("lanes").replaceChildren(this.lanes.direct.element, this.lanes.speculative.element);
  }

  take(event) {
    if (event.type === "lane") $("headline").replaceChildren(h("p", { class: "progress" }, t(`running_${event.lane}`)));
    else if (event.type === "round") this.lanes[event.lane].add(event);
    else if (event.type === "end") this.lanes[event.lane].end(event);
    else if (event.type === "comparison") {
      this.comparison = event;
      this.finished = true;
      this.lengthMs = Math.max(...Object.values(this.lanes).map((lane) => lane.totalMs)) * 1.001;
      this.showResult();
      this.roundView.use(this.lanes.speculative.rounds);
      $("player").hidden = false;
      this.play();
    }
  }

  showResult() {
    const { direct, speculative } = this.lanes;
    for (const lane of [direct, speculative]) lane.draw(this.lengthMs);
    const ratio = direct.totalMs / count(direct) / (speculative.totalMs / count(speculative));
    const times = t("headline_times", { speculative: seconds(speculative.totalMs), direct: seconds(direct.totalMs) });
    const word = Math.abs(ratio - 1) < EVEN ? "even" : ratio > 1 ? "faster" : "slower";
    const { outcome, position, gap, noise } = this.comparison;
    const values = { position: (position ?? 0) + 1, gap: number(gap, 3), noise: number(noise, 3) };
    const sameness = { equal: t("same_text"), near_tie: t("near_tie", values), parted: t("parted", values) }[outcome];
    const lines = [
      h("p", { class: "big", "data-speedup": ratio.toFixed(3) }, t(word, { ratio: number(ratio, 2) })),
      aside(word, speculative),
      h("p", {}, count(direct) === count(speculative) ? times : `${times} ${t("per_token")}`),
      h("p", { class: `sameness ${outcome}`, "data-outcome": outcome }, sameness),
    ];
    $("headline").replaceChildren(...lines.filter((line) => line !== null));
    this.showNumbers();
  }

  showNumbers() {
    const lanes = [this.lanes.direct, this.lanes.speculative];
    const rows = [];
    const add = (key, value, digits, unit = "", compare = true) => {
      const values = lanes.map(value);
      if (values.every((v) => v === null || v === undefined)) return;
      const ratio = compare && values[0] && values[1] ? values[1] / values[0] : null;
      const cell = (v) => h("td", {}, v === null || v === undefined ? "–" : `${number(v, digits)}${unit}`);
      rows.push(h("tr", {}, h("th", { scope: "row" }, t(key)), ...values.map(cell), h("td", { class: "ratio" }, ratio === null ? "" : `${number(ratio, 2)}×`)));
    };
    add("total", (lane) => lane.totalMs / 1000, 2, " s");
    add("first_token", (lane) => lane.report.ttft_ms / 1000, 2, " s");
    add("tokens_per_second", (lane) => lane.report.tokens_per_second, 1);
    add("tokens", (lane) => count(lane), 0, "", false);
    add("rounds", (lane) => lane.report.rounds, 0);
    add("tokens_a_round", (lane) => count(lane) / lane.report.rounds, 2);
    add("acceptance", (lane) => (lane.report.acceptance_rate === undefined ? null : lane.report.acceptance_rate * 100), 0, " %", false);
    add("mean_draft", (lane) => mean(lane.rounds.map((round) => round.draft.length)), 1, "", false);
    add("mean_gamma", (lane) => mean(lane.rounds.map((round) => round.gamma)), 1, "", false);
    add("drafting_share", (lane) => draftingShare(lane) * 100, 1, " %", false);
    add("energy", (lane) => lane.report.energy_j, 1, " J");
    add("energy_token", (lane) => (lane.report.energy_j === undefined ? null : lane.report.energy_j / count(lane)), 3, " J");
    const source = lanes[1].report.energy_source;
    $("numbers").hidden = false;
    $("numbers").replaceChildren(
      h("h2", {}, t("numbers")),
      h("table", { class: "figures" },
        h("thead", {}, h("tr", {}, h("td"), h("th", { scope: "col" }, t("lane_direct")), h("th", { scope: "col" }, t("lane_speculative")), h("th", { scope: "col" }, t("ratio")))),
        h("tbody", {}, ...rows)),
      h("p", { class: "hint" }, `${t("speed_hint")} ${source ? t("energy_hint", { source: t(`source_${source}`) }) : ""}`),
    );
  }

  play() {
    if (!this.finished) return;
    if (Number($("scrub").value) >= 1000) this.seek(0);
    let last = performance.now();
    const step = (now) => {
      this.seek(this.nowMs + (now - last) * Number($("pace").value));
      last = now;
      if (this.nowMs < this.lengthMs) this.frame = requestAnimationFrame(step);
      else this.stopAtEnd();
    };
    this.frame = requestAnimationFrame(step);
    this.labelPlay();
  }

  pause() {
    if (this.frame) cancelAnimationFrame(this.frame);
    this.frame = null;
    this.labelPlay();
  }

  /** The end of the replay: the last rejected drafts have fallen too. */
  stopAtEnd() {
    this.pause();
    for (const lane of Object.values(this.lanes)) lane.show(Infinity);
  }

  labelPlay() {
    $("play").textContent = this.frame ? "❚❚" : "▶";
    $("play").setAttribute("aria-label", t(this.frame ? "pause" : "play"));
  }

  seek(ms) {
    this.nowMs = Math.min(Math.max(ms, 0), this.lengthMs);
    $("scrub").value = String(Math.round((this.nowMs / this.lengthMs) * 1000));
    $("scrub").setAttribute("aria-valuetext", seconds(this.nowMs));
    $("clock").textContent = seconds(this.nowMs);
    for (const lane of Object.values(this.lanes)) lane.show(this.nowMs);
  }
}

/** Why it was not faster: drafts lost, or there were none to begin with. */
function aside(word, lane) {
  if (lane.rounds.every((round) => round.draft.length === 0)) {
    return h("p", { class: "aside" }, t("aside_undrafted", { reason: t(`reason_${lane.rounds.at(-1).reason}`) }));
  }
  return word === "faster" ? null : h("p", { class: "aside" }, t(`aside_${word}`));
}

function count(lane) {
  return lane.rounds.reduce((sum, round) => sum + round.tokens.length, 0);
}

function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

function draftingShare(lane) {
  const drafting = lane.rounds.reduce((sum, round) => sum + round.draft_ms, 0);
  const verifying = lane.rounds.reduce((sum, round) => sum + round.verify_ms, 0);
  return drafting / (drafting + verifying);
}
