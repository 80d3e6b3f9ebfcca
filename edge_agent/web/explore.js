// The formula with sliders: the ideal curve, and the one that this machine was measured to have.
import { $, h, svg } from "/web/dom.js";
import { number, t } from "/web/i18n.js";

const MAX_GAMMA = 12;
const BOX = { width: 720, height: 380, left: 52, right: 20, top: 20, bottom: 46 };

/** E(alpha, gamma): tokens that a round commits. */
function expectedTokens(alpha, gamma) {
  let expected = 1;
  let survival = 1;
  for (let i = 0; i < gamma; i += 1) {
    survival *= alpha;
    expected += survival;
  }
  return expected;
}

/** c(m) in target tokens; past its end a measured curve goes on with its last slope. */
function costAt(curve, positions) {
  if (positions <= curve.length) return curve[positions - 1] / curve[0];
  const slope = curve.length > 1 ? Math.max(curve.at(-1) - curve.at(-2), 0) : curve[0];
  return (curve.at(-1) + slope * (positions - curve.length)) / curve[0];
}

function speedups(alpha, ratio, curve) {
  return Array.from({ length: MAX_GAMMA + 1 }, (_, gamma) => expectedTokens(alpha, gamma) / (costAt(curve, gamma + 1) + gamma * ratio));
}

function best(values) {
  return values.reduce((top, value, gamma) => (value > values[top] + 1e-9 ? gamma : top), 0);
}

export class Explore {
  constructor(facts) {
    this.curve = facts.verify_ms?.length > 1 ? facts.verify_ms : null;
    const draft = facts.draft_token_ms?.model;
    if (draft && this.curve) $("ratio").value = String(Math.min(draft / this.curve[0], 1).toFixed(2));
    for (const id of ["alpha", "ratio", "gamma"]) $(id).addEventListener("input", () => this.draw());
    document.addEventListener("souschef:language", () => this.draw());
    this.draw();
  }

  draw() {
    const [alpha, ratio, gamma] = ["alpha", "ratio", "gamma"].map((id) => Number($(id).value));
    $("alpha-value").textContent = number(alpha, 2);
    $("ratio-value").textContent = number(ratio, 2);
    $("gamma-value").textContent = number(gamma);
    const ideal = speedups(alpha, ratio, [1, 1]);
    const measured = this.curve ? speedups(alpha, ratio, this.curve) : null;
    const [top, topMeasured] = [best(ideal), measured ? best(measured) : 0];
    const at = (values, index) => t("at_gamma", { speedup: number(values[index], 2), gamma: index });
    const breakEven = (this.curve ? costAt(this.curve, 2) : 1) - 1 + ratio;
    const tiles = [
      ["best_ideal", at(ideal, top)],
      ["best_measured", measured ? at(measured, topMeasured) : "–"],
      [t("here_measured", { gamma }), `${number((measured ?? ideal)[gamma], 2)}×`],
      ["break_even", breakEven < 1 ? number(breakEven, 2) : t("none")],
    ];
    $("explore-tiles").replaceChildren(...tiles.map(([key, value]) => h("div", {}, h("dt", {}, t(key)), h("dd", {}, value))));
    const promise = number(ideal[top], 2);
    $("explore-verdict").textContent = !measured
      ? t("verdict_nothing")
      : topMeasured > 0
        ? t("verdict_wins", { gamma: topMeasured, speedup: number(measured[topMeasured], 2), ideal: promise })
        : t("verdict_loses", { ideal: promise });
    $("chart").replaceChildren(chart(ideal, measured, gamma), chartLegend(measured));
    this.drawTable();
  }

  drawTable() {
    const cells = (this.curve ?? []).map((cost, index) =>
      h("tr", {}, h("th", { scope: "row" }, String(index + 1)), h("td", {}, number(cost, 1)), h("td", {}, `${number(cost / this.curve[0], 2)}×`)),
    );
    $("curve-table").replaceChildren(
      h("caption", { class: "hint" }, t("curve_table")),
      h("thead", {}, h("tr", {}, ...["positions", "cost_ms", "cost_ratio"].map((key) => h("th", { scope: "col" }, t(key))))),
      h("tbody", {}, ...cells),
    );
  }
}

function chart(ideal, measured, gamma) {
  const most = Math.max(2, ...ideal, ...(measured ?? [])) * 1.06;
  const x = (value) => BOX.left + (value / MAX_GAMMA) * (BOX.width - BOX.left - BOX.right);
  const y = (value) => BOX.height - BOX.bottom - (value / most) * (BOX.height - BOX.top - BOX.bottom);
  const step = most > 6 ? 2 : most > 3 ? 1 : 0.5;
  const grid = [];
  for (let value = 0; value <= most; value += step) {
    grid.push(svg("line", { class: value === 1 ? "one" : "grid", x1: BOX.left, x2: BOX.width - BOX.right, y1: y(value), y2: y(value) }));
    grid.push(svg("text", { class: "tick", x: BOX.left - 8, y: y(value) + 4, "text-anchor": "end" }, `${number(value, step < 1 ? 1 : 0)}×`));
  }
  for (let value = 0; value <= MAX_GAMMA; value += 1) grid.push(svg("text", { class: "tick", x: x(value), y: BOX.height - BOX.bottom + 20, "text-anchor": "middle" }, String(value)));
  const line = (values, name) => svg("path", { class: `line ${name}`, d: values.map((value, index) => `${index ? "L" : "M"}${x(index)} ${y(value)}`).join("") });
  const points = (values, name) =>
    values.map((value, index) =>
      name === "measured"
        ? svg("rect", { class: `point ${name}`, x: x(index) - 4, y: y(value) - 4, width: 8, height: 8 })
        : svg("circle", { class: `point ${name}`, cx: x(index), cy: y(value), r: 4 }),
    );
  const peak = (values, name) => {
    const top = best(values);
    return [svg("circle", { class: `peak ${name}`, cx: x(top), cy: y(values[top]), r: 9 }), svg("text", { class: `peak-label ${name}`, x: x(top), y: y(values[top]) - 15, "text-anchor": top === MAX_GAMMA ? "end" : "middle" }, `${number(values[top], 2)}×`)];
  };
  return svg(
    "svg",
    { viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img", "aria-label": t("chart_label") },
    ...grid,
    svg("line", { class: "marker", x1: x(gamma), x2: x(gamma), y1: BOX.top, y2: BOX.height - BOX.bottom }),
    line(ideal, "ideal"), ...points(ideal, "ideal"), ...peak(ideal, "ideal"),
    ...(measured ? [line(measured, "measured"), ...points(measured, "measured"), ...peak(measured, "measured")] : []),
    svg("text", { class: "axis", x: (BOX.left + BOX.width - BOX.right) / 2, y: BOX.height - 6, "text-anchor": "middle" }, t("chart_x")),
  );
}

function chartLegend(measured) {
  const entry = (name) => h("span", { class: `key ${name}` }, h("span", { class: "swatch", "aria-hidden": true }, name === "measured" ? "■" : "●"), ` ${t(name)}`);
  return h("figcaption", { class: "legend" }, entry("ideal"), measured ? entry("measured") : null);
}
