"use strict";
// The console. It reads the server's own API. All that the server says is inserted as text.
// The key is a variable of this function: never stored, and sent only as a header to this server.
(() => {
  const PAUSE_MS = 2000;
  const TIMEOUT_MS = 8000;
  const MOST_SHOWN = 200000; // characters of an answer
  const MOST_VALUES = 1000; // of an input in an example
  const METRICS = "monitoring/prometheus/metrics";
  const COUNT = /^:tensorflow:serving:request_count\{model_name="((?:[^"\\]|\\.)*)",status="(\w+)"\} (\S+)$/gm;
  const $ = (id) => document.getElementById(id);
  const cards = new Map();
  let key = "";
  let hasMetrics = true;

  function element(tag, text, className) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  function ask(path, options = {}) {
    const headers = key ? { ...options.headers, "X-API-Key": key } : options.headers;
    return fetch(path, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS), ...options, headers });
  }

  async function poll() {
    try {
      if (!document.hidden) {
        const answer = await ask("models");
        if (answer.status === 401) {
          askForKey();
          return;
        }
        if (!answer.ok) throw new Error(`it answered ${answer.status}`);
        const { models } = await answer.json();
        show(models, await counts());
      }
    } catch (error) {
      $("banner").textContent = `The server does not answer: ${error.message}. The page below is old.`;
      $("banner").hidden = false;
      health("not answering", "bad");
    }
    setTimeout(poll, PAUSE_MS);
  }

  /** Returns model -> status -> requests since the start, by the metrics of the server. */
  async function counts() {
    const found = new Map();
    if (!hasMetrics) return found;
    const answer = await ask(METRICS);
    hasMetrics = answer.status !== 404;
    for (const [, name, status, count] of (answer.ok ? await answer.text() : "").matchAll(COUNT)) {
      const model = name.replace(/\\(.)/g, (_, one) => (one === "n" ? "\n" : one));
      found.set(model, { ...found.get(model), [status]: Number(count) });
    }
    return found;
  }

  function health(text, style) {
    $("health").textContent = text;
    $("health").className = `pill ${style}`;
  }

  function askForKey() {
    $("refusal").textContent = key ? "The server refused this key." : "";
    key = "";
    $("login").hidden = false;
    $("main").hidden = true;
    health("locked", "");
    $("key").value = "";
    $("key").focus();
  }

  $("login").addEventListener("submit", (event) => {
    event.preventDefault();
    const given = $("key").value.trim();
    if (!/^[!-~]+$/.test(given)) {
      $("refusal").textContent = "A key has ASCII characters only, and no spaces.";
      return;
    }
    key = given;
    poll();
  });

  function show(models, figures) {
    $("banner").hidden = true;
    $("login").hidden = true;
    $("main").hidden = false;
    $("key").value = "";
    $("none").hidden = models.length > 0;
    $("metrics").hidden = hasMetrics;
    const missing = models.filter((model) => !available(model).length).length;
    health(missing ? `not ready: ${missing} of ${models.length} models` : "ready", missing ? "" : "good");
    for (const [name, card] of cards) {
      if (!models.some((model) => model.name === name)) {
        card.root.remove();
        cards.delete(name);
      }
    }
    for (const model of models) {
      if (!cards.has(model.name)) cards.set(model.name, new Card(model.name));
      cards.get(model.name).show(model, figures.get(model.name));
    }
  }

  class Card {
    constructor(name) {
      this.name = name;
      this.root = $("model").content.firstElementChild.cloneNode(true);
      $("models").append(this.root);
      this.find = (selector) => this.root.querySelector(selector);
      this.find("h2").textContent = name;
      this.find(".open").setAttribute("aria-label", `Try model ${name}`);
      this.find(".open").addEventListener("click", () => this.open());
      this.find(".version").addEventListener("change", () => this.load());
      this.find(".signature").addEventListener("change", () => this.fill());
      this.find(".body").addEventListener("input", () => this.snippet());
      this.find("form").addEventListener("submit", (event) => {
        event.preventDefault();
        this.send();
      });
    }

    show(model, figures = {}) {
      this.find(".fault").textContent = model.error || "";
      const texts = Object.entries(figures).map(([status, count]) => `${count.toLocaleString("en")} × ${status}`);
      this.find(".figures").textContent = texts.length ? `Requests: ${texts.join(", ")}` : "";
      const seen = JSON.stringify(model);
      if (seen === this.seen) return; // what is selected or unfolded stays so
      this.seen = seen;
      this.find("tbody").replaceChildren(...model.model_version_status.map((one) => this.row(one, model.labels)));
      this.find(".open").disabled = !available(model).length;
      options(this.find(".version"), [["", "newest"], ...available(model).map((one) => [`/versions/${one}`, one])]);
    }

    row({ version, state, status }, labels) {
      const row = element("tr");
      const named = Object.entries(labels).filter(([, one]) => one === version).map(([label]) => label);
      const failed = status.error_message !== "";
      const style = failed ? "bad" : state === "AVAILABLE" ? "good" : "";
      const shown = element("td");
      shown.append(element("span", failed ? "FAILED" : state, `pill ${style}`));
      row.append(element("td", version), shown, element("td", named.join(", ")), element("td", status.error_message, "failure"));
      return row;
    }

    open() {
      const panel = this.find(".try");
      panel.hidden = !panel.hidden;
      this.find(".open").setAttribute("aria-expanded", String(!panel.hidden));
      if (!panel.hidden) this.load();
    }

    url(suffix) {
      return `v1/models/${encodeURIComponent(this.name)}${this.find(".version").value}${suffix}`;
    }

    async load() {
      try {
        const answer = await ask(this.url("/metadata"));
        const found = await answer.json();
        if (!answer.ok) throw new Error(found.error);
        const definitions = Object.entries(found.metadata.signature_def.signature_def);
        this.signatures = new Map(definitions.filter(([name]) => !name.startsWith("__saved_model_")));
        const names = [...this.signatures.keys()].sort((one, other) => (other === "serving_default") - (one === "serving_default"));
        options(this.find(".signature"), names.map((name) => [name, name]));
        this.fill();
      } catch (error) {
        this.find(".describes").textContent = `The signatures cannot be read: ${error.message}`;
      }
    }

    fill() {
      const name = this.find(".signature").value;
      const { inputs = {}, outputs = {}, method_name: method } = this.signatures.get(name);
      this.method = { "tensorflow/serving/classify": "classify", "tensorflow/serving/regress": "regress" }[method] || "predict";
      const side = (infos) => Object.entries(infos).map(([alias, info]) => `${alias}: ${info.dtype} ${shape(info)}`).join(", ");
      this.find(".describes").textContent = `${side(inputs) || "no input"}  →  ${side(outputs)}`;
      this.find(".body").value = JSON.stringify({
        ...(name === "serving_default" ? {} : { signature_name: name }),
        ...(this.method === "predict" ? example(Object.entries(inputs)) : { examples: [{}] }),
      });
      this.snippet();
    }

    async send() {
      const started = performance.now();
      this.find(".send").disabled = true;
      try {
        const answer = await ask(this.url(`:${this.method}`), { method: "POST", body: this.find(".body").value });
        const text = await answer.text();
        this.answered(String(answer.status), answer.ok, `${(performance.now() - started).toFixed(1)} ms`, text);
      } catch (error) {
        this.answered("no answer", false, "", error.message);
      }
      this.find(".send").disabled = false;
    }

    answered(status, ok, duration, text) {
      this.find(".answer").hidden = false;
      this.find(".status").textContent = status;
      this.find(".status").className = `status pill ${ok ? "good" : "bad"}`;
      this.find(".duration").textContent = text.length > MOST_SHOWN ? `${duration}, the first ${MOST_SHOWN} characters` : duration;
      this.find(".answer pre").textContent = text.slice(0, MOST_SHOWN);
    }

    snippet() {
      const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
      const secret = key ? ' -H "X-API-Key: $API_KEY"' : "";
      const url = new URL(this.url(`:${this.method}`), document.baseURI).href;
      this.find(".snippet").textContent = `curl ${quoted(url)}${secret} -d ${quoted(this.find(".body").value)}`;
    }
  }

  function available(model) {
    return model.model_version_status.filter((one) => one.state === "AVAILABLE").map((one) => one.version);
  }

  function options(select, choices) {
    const before = select.value;
    select.replaceChildren(...choices.map(([value, text]) => {
      const option = element("option", text);
      option.value = value;
      return option;
    }));
    if (choices.some(([value]) => value === before)) select.value = before;
  }

  function sizes({ tensor_shape: found }) {
    return found.unknown_rank ? null : found.dim.map((one) => Number(one.size));
  }

  function shape(info) {
    const found = sizes(info);
    return found === null ? "of any shape" : `[${found.map((size) => (size < 0 ? "?" : size)).join(", ")}]`;
  }

  /** Returns a request of zeros for one row. The form is there to be edited. */
  function example(inputs) {
    const hasRows = inputs.every(([, info]) => (sizes(info) || [-1])[0] < 0);
    const values = Object.fromEntries(inputs.map(([alias, info]) => {
      const found = (sizes(info) || [-1]).slice(hasRows ? 1 : 0).map((size) => Math.max(size, 1));
      const zero = { DT_STRING: "", DT_BOOL: false }[info.dtype] ?? 0;
      const isLarge = found.reduce((one, other) => one * other, 1) > MOST_VALUES;
      return [alias, isLarge ? [] : found.reduceRight((inner, size) => Array(size).fill(inner), zero)];
    }));
    return hasRows ? { instances: [values] } : { inputs: values };
  }

  poll();
})();
