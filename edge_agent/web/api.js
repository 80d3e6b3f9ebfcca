// Talking to the agent: JSON, event streams, and the key where one is asked for.
import { $ } from "/web/dom.js";
import { t } from "/web/i18n.js";

const STORE = "souschef.key";
let asking = null;

export class AgentError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function headers(extra) {
  const key = sessionStorage.getItem(STORE);
  return key ? { ...extra, Authorization: `Bearer ${key}` } : extra;
}

/** One request; asks for the key and tries again where the agent wants one. */
async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(options.headers ?? {}) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new AgentError(t("offline"), 0);
  }
  if (response.status === 401) {
    await askForKey();
    return request(path, options);
  }
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new AgentError(body?.error?.message ?? `HTTP ${response.status}`, response.status);
  }
  return response;
}

function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    $("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem(STORE, $("key").value.trim());
      $("key").value = "";
      dialog.close();
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

export async function getJson(path) {
  return (await request(path)).json();
}

export async function postJson(path, body) {
  const response = await request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  return response.status === 204 ? null : response.json().catch(() => null);
}

/** The events of a stream, one by one. `body` makes it a POST. */
export async function* events(path, { body, signal } = {}) {
  const options = body
    ? { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal }
    : { signal };
  const response = await request(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (pending + value).split("\n\n");
      pending = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue;
        const data = part.slice(6);
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new AgentError(event.error.message, 200);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
