// One round under the magnifying glass: what was drafted, what the target said, where it was cut.
import { h, visible } from "/web/dom.js";
import { number, t } from "/web/i18n.js";

export class RoundView {
  constructor(root) {
    this.root = root;
    this.rounds = [];
    this.index = 0;
    this.previous = h("button", { type: "button", class: "round-button", onclick: () => this.move(-1) }, "‹");
    this.next = h("button", { type: "button", class: "round-button", onclick: () => this.move(1) }, "›");
    this.position = h("p", { class: "position", role: "status" });
    this.title = h("h2");
    this.body = h("div", { class: "round-body" });
    root.replaceChildren(h("header", { class: "round-head" }, this.title, h("div", { class: "stepper" }, this.previous, this.position, this.next)), this.body);
    root.addEventListener("keydown", (event) => {
      if (event.key === "ArrowLeft") this.move(-1);
      else if (event.key === "ArrowRight") this.move(1);
    });
  }

  /** Begins at the first round that drafted something. */
  use(rounds) {
    this.rounds = rounds;
    const drafted = rounds.findIndex((round) => round.draft.length > 1 && round.accepted > 0);
    this.pick(Math.max(drafted, 0));
  }

  move(step) {
    this.pick(this.index + step);
  }

  pick(index) {
    if (!this.rounds.length) return;
    this.index = Math.min(Math.max(index, 0), this.rounds.length - 1);
    this.root.hidden = false;
    this.draw();
  }

  draw() {
    const round = this.rounds[this.index];
    if (!round) return;
    this.title.textContent = t("round_view");
    this.previous.setAttribute("aria-label", t("previous"));
    this.next.setAttribute("aria-label", t("next"));
    this.previous.disabled = this.index === 0;
    this.next.disabled = this.index === this.rounds.length - 1;
    this.position.textContent = t("round_of", { number: this.index + 1, count: this.rounds.length });
    const gained = round.tokens.length;
    this.body.replaceChildren(
      h("p", { class: "hint" }, `${t(`mode_${round.mode}`)} · γ ${round.gamma} · ${t(`reason_${round.reason}`)}`),
      h("p", {}, round.draft.length ? t("drafted_by", { drafter: t(`drafter_${round.drafter}`) }) : t("nothing_drafted")),
      h("ol", { class: "places" }, ...places(round)),
      h("p", { class: "hint" }, t("verify_cost", {
        positions: round.draft.length + 1,
        ms: number(round.verify_ms, 1),
        draft: number(round.draft_ms, 1),
        tokens: gained === 0 ? t("no_token") : gained === 1 ? t("one_token") : t("n_tokens", { n: gained }),
      })),
    );
  }
}

function places(round) {
  const drafted = round.draft.map((draft, index) => {
    const state = draft.accepted ? "accepted" : index === round.accepted ? "rejected" : "not_checked";
    const mark = { accepted: "✓ ", rejected: "✕ ", not_checked: "· " }[state];
    const said = state === "not_checked" ? null : round.tokens[index];
    return place(state, draft.text, state === "accepted" ? "draft" : "rejected", [h("span", { "aria-hidden": true }, mark), t(state)], confidence(draft.confidence), alternatives(said, round));
  });
  const token = round.tokens[round.accepted];
  const kind = !round.draft.length ? "plain" : round.accepted === round.draft.length ? "bonus" : "recovered";
  const name = token ? t(kind) : t("end_token");
  const mark = { recovered: `✂ ${t("cut_here")} · `, bonus: "+ ", plain: "" }[kind];
  const shown = kind === "recovered" ? null : alternatives(token, round);
  const extra = place(kind, round.next, token ? token.origin : "target", [mark + name], null, shown);
  drafted.splice(kind === "recovered" ? round.accepted + 1 : drafted.length, 0, extra);
  return drafted;
}

function place(state, text, origin, mark, sure, said) {
  return h(
    "li",
    { class: `place ${state}` },
    h("div", { class: "place-head" }, h("span", { class: `token ${origin}` }, visible(text)), h("span", { class: "mark" }, ...mark), sure),
    said,
  );
}

/** How sure the drafter was: a bar, and the figure beside it. */
function confidence(value) {
  if (value === null || value === undefined) return null;
  const filled = h("span");
  filled.style.width = `${value * 100}%`;
  return h("span", { class: "sure" }, h("span", { class: "hint" }, t("confidence")), h("span", { class: "bar-box", "aria-hidden": true }, filled), h("span", { class: "figure" }, `${number(value * 100)} %`));
}

/** What the target thought of this place: its likeliest tokens. */
function alternatives(token, round) {
  if (!token?.top?.length) return null;
  const chips = token.top.slice(0, 4).map(([text, probability]) => {
    const chosen = text === token.text || text === round.next;
    return h("span", { class: `alternative ${chosen ? "chosen" : ""}` }, h("span", { class: "token-text" }, visible(text)), ` ${number(probability * 100)} %`);
  });
  return h("div", { class: "alternatives" }, h("span", { class: "hint" }, t("target_said")), ...chips);
}
