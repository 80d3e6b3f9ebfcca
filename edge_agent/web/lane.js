// One lane of tokens: grows as rounds arrive, and can be shown as it was at any time.
import { h, svg, visible } from "/web/dom.js";
import { number, seconds, t } from "/web/i18n.js";

const FALL_MS = 1100;
const BAR_HEIGHT = 40;

export const ORIGINS = ["draft", "target", "cloud"];

/** A token of an answer, marked by who made it: a tint and an underline of its own for each origin. */
export function tokenSpan(token) {
  const span = h("span", { class: `token ${token.origin}` }, token.text);
  span.title = `${t(`origin_${token.origin}`)}${token.probability === undefined || token.probability === null ? "" : ` · ${number(token.probability * 100)} %`}`;
  return span;
}

export function legend(list, origins) {
  list.replaceChildren(
    ...origins.map((origin) => h("li", {}, h("span", { class: `token ${origin}`, "aria-hidden": true }, "abc"), ` ${t(`origin_${origin}`)}`)),
  );
}

export class Lane {
  constructor(name, onPick) {
    this.name = name;
    this.onPick = onPick;
    this.rounds = [];
    this.text = h("div", { class: "answer", tabindex: "0", role: "region" });
    this.clock = h("span", { class: "lane-clock" });
    this.speed = h("span", { class: "lane-speed" });
    this.title = h("h2");
    this.subtitle = h("p", { class: "hint" });
    this.strip = h("figure", { class: "strip" });
    this.element = h(
      "article",
      { class: `card lane ${name}` },
      h("header", { class: "lane-head" }, h("div", {}, this.title, this.subtitle), h("div", { class: "lane-figures" }, this.clock, this.speed)),
      this.strip,
      this.text,
    );
    this.totalMs = null;
    this.report = null;
    this.label();
    this.show(0);
  }

  label() {
    this.title.textContent = t(`lane_${this.name}`);
    this.subtitle.textContent = t(`lane_${this.name}_sub`);
    this.text.setAttribute("aria-label", `${t("answer")}: ${t(`lane_${this.name}`)}`);
    if (!this.rounds.length) this.speed.textContent = t("waiting");
  }

  /** A round came in. It is shown at once, its rejected drafts falling. */
  add(round) {
    const tokens = round.tokens.map(tokenSpan);
    const texts = round.draft.slice(round.accepted).map((token) => visible(token.text));
    // Out of the flow: what falls must not push the text about.
    const falling = texts.length ? h("span", { class: "token rejected falling", "aria-hidden": true, hidden: true }, texts.join(" ")) : null;
    this.text.append(...tokens, ...(falling ? [falling] : []));
    this.rounds.push({ ...round, spans: tokens, falling });
    this.show(round.at_ms);
    this.text.scrollTop = this.text.scrollHeight;
  }

  end(event) {
    this.totalMs = event.total_ms;
    this.report = event.report;
  }

  /** As it was `ms` milliseconds after the request. */
  show(ms) {
    let tokens = 0;
    let last = null;
    for (const round of this.rounds) {
      const done = round.at_ms <= ms;
      for (const span of round.spans) span.hidden = !done;
      if (round.falling) round.falling.hidden = !done || ms - round.at_ms >= FALL_MS;
      if (done) {
        tokens += round.tokens.length;
        last = round;
      }
    }
    const first = this.rounds[0];
    const end = this.totalMs === null ? ms : Math.min(ms, this.totalMs);
    this.clock.textContent = this.rounds.length ? seconds(end) : "";
    if (last && first && last !== first) {
      const speed = ((tokens - first.tokens.length) / (last.at_ms - first.at_ms)) * 1000;
      this.speed.textContent = t("speed", { n: number(speed, 1) });
    } else if (this.rounds.length) {
      this.speed.textContent = "";
    }
    this.element.classList.toggle("done", this.totalMs !== null && ms >= this.totalMs);
    if (this.playhead) this.playhead.setAttribute("x", String((Math.min(ms, this.scaleMs) / this.scaleMs) * 1000));
  }

  /** A bar for each round on a clock that ends at `scaleMs`. */
  draw(scaleMs) {
    this.scaleMs = scaleMs;
    const most = Math.max(...this.rounds.map((round) => round.tokens.length), 4);
    const x = (ms) => (ms / scaleMs) * 1000;
    let start = 0;
    const bars = this.rounds.map((round, index) => {
      const height = Math.max((round.tokens.length / most) * BAR_HEIGHT, 1.5);
      const kind = index === 0 ? "prefill" : round.accepted > 0 ? "draft" : round.tokens.some((token) => token.origin === "cloud") ? "cloud" : "target";
      const bar = svg("rect", { class: `bar ${kind}`, x: x(start), y: BAR_HEIGHT - height, width: Math.max(x(round.at_ms) - x(start) - 0.8, 0.8), height });
      bar.append(svg("title", {}, `${t("round_of", { number: index + 1, count: this.rounds.length })}: ${visible(round.tokens.map((token) => token.text).join(""))}`));
      bar.addEventListener("click", () => this.onPick?.(index));
      start = round.at_ms;
      return bar;
    });
    this.playhead = svg("rect", { class: "playhead", x: 0, y: 0, width: 2, height: BAR_HEIGHT });
    const picture = svg("svg", { viewBox: `0 0 1000 ${BAR_HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": t("strip_label", { lane: t(`lane_${this.name}`) }) }, ...bars, this.playhead);
    this.strip.replaceChildren(picture);
  }
}
