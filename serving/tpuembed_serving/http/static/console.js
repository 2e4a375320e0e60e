"use strict";
// The console. It reads console/state every second. All that the server says is inserted as text.
// The key is a variable of this function: never stored, and sent only as a header to this server.
(() => {
  const PAUSE_MS = 1000;
  const TIMEOUT_MS = 8000;
  const MOST_SHOWN = 200000; // characters of an answer
  const SVG = "http://www.w3.org/2000/svg";
  const $ = (id) => document.getElementById(id);
  const cards = new Map();
  let key = "";
  let server = {};
  let timer = 0;
  let turn = 0;

  // ---- text

  function element(tag, text, className) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  function setText(node, text) {
    if (node.textContent !== text) node.textContent = text;
  }

  function rate(value) {
    return value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(value >= 10 || value === 0 ? 0 : 1);
  }

  function milliseconds(value) {
    if (value === null || value === undefined) return "–";
    if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
    return `${value.toFixed(value >= 10 ? 0 : 2)} ms`;
  }

  function seconds(value) {
    if (value === null || value === undefined) return "–";
    if (value < 60) return `${Number.isInteger(value) ? value : value.toFixed(2)} s`;
    const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
    const first = parts.findIndex(([size]) => value >= size);
    return parts.slice(first, first + 2)
      .map(([size, unit], at) => `${Math.floor((at ? value % parts[first][0] : value) / size)} ${unit}`).join(" ");
  }

  function bytes(value) {
    if (value === null || value === undefined) return "–";
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (value >= 1024 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
    return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
  }

  // ---- the server's data

  function headers(more) {
    return key ? { ...more, "X-API-Key": key } : { ...more };
  }

  function read(path) {
    return fetch(path, { headers: headers(), cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  }

  async function poll() {
    const mine = ++turn;
    clearTimeout(timer);
    try {
      const answer = await read("console/state");
      if (mine !== turn) return;
      if (answer.status === 401) {
        askForKey(key ? "The server refused this key." : "");
        return;
      }
      if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
      const state = await answer.json();
      if (mine !== turn) return;
      show(state);
    } catch (error) {
      if (mine !== turn) return;
      offline(error);
    }
    timer = setTimeout(poll, PAUSE_MS);
  }

  document.addEventListener("visibilitychange", () => {
    if (!$("login").hidden) return;
    if (document.hidden) {
      turn++;
      clearTimeout(timer);
    } else poll();
  });

  function askForKey(why) {
    key = "";
    $("login").hidden = false;
    $("main").hidden = true;
    $("banner").hidden = true;
    $("logout").hidden = true;
    setText($("health"), "locked");
    $("health").className = "pill";
    setText($("facts"), "");
    setText($("refusal"), why);
    $("key").value = "";
    $("key").focus();
  }

  $("login").addEventListener("submit", (event) => {
    event.preventDefault();
    const given = $("key").value.trim();
    if (!/^[!-~]+$/.test(given)) {
      setText($("refusal"), "A key has ASCII characters only, and no spaces.");
      return;
    }
    key = given;
    poll();
  });

  $("logout").addEventListener("click", () => {
    turn++;
    clearTimeout(timer);
    cards.clear();
    $("models").replaceChildren();
    askForKey("");
  });

  function offline(error) {
    const timedOut = error.name === "TimeoutError";
    const why = timedOut ? "it did not answer in time" : error instanceof TypeError ? "no connection" : error.message;
    setText($("banner"), `The server does not answer: ${why}. Trying again every second. The figures below are old.`);
    $("banner").hidden = false;
    setText($("health"), "not answering");
    $("health").className = "pill bad";
  }

  // ---- the overview

  function show(state) {
    server = state.server;
    $("banner").hidden = true;
    $("login").hidden = true;
    $("main").hidden = false;
    $("key").value = "";
    $("logout").hidden = !server.keys;
    setText($("host"), location.host);
    const missing = state.models.filter((model) => !model.versions.some((version) => version.state === "AVAILABLE")).length;
    const waits = `not ready: ${missing} of ${state.models.length} models`;
    const health = server.stopping ? ["stopping", ""] : server.ready ? ["ready", "good"] : [missing ? waits : "not ready", ""];
    setText($("health"), health[0]);
    $("health").className = `pill ${health[1]}`;
    const behind = server.target ? ` · models run in ${server.target}` : "";
    setText($("facts"), `version ${server.version} · up ${seconds(Math.floor(server.seconds))}${behind}`);

    const busy = state.models.map((model) => model.traffic).filter(Boolean);
    const sum = (name) => busy.reduce((total, traffic) => total + traffic[name], 0);
    setText($("total-rate"), rate(sum("per_second")));
    setText($("total-errors"), rate(sum("failures_per_second")));
    $("total-errors").className = sum("failures_per_second") ? "failure" : "";
    ofMost($("total-queue"), server.waiting, server.most_waiting);
    ofMost($("total-workers"), server.answering, server.workers);

    const names = new Set(state.models.map((model) => model.name));
    for (const [name, card] of cards) {
      if (!names.has(name)) {
        card.root.remove();
        cards.delete(name);
      }
    }
    state.models.forEach((model, at) => {
      let card = cards.get(model.name);
      if (!card) {
        card = new Card(model.name);
        cards.set(model.name, card);
      }
      if ($("models").children[at] !== card.root) $("models").insertBefore(card.root, $("models").children[at] || null);
      card.show(model);
    });
    $("none").hidden = state.models.length > 0;
    $("others").hidden = !state.others;
    setText($("others"), `${state.others.toLocaleString("en")} answers to requests for models that this server does not have.`);
  }

  function ofMost(node, value, most) {
    const text = value.toLocaleString("en");
    const rest = ` of ${most.toLocaleString("en")}`;
    if (node.textContent !== text + rest) node.replaceChildren(text, element("small", rest));
  }

  const STATES = { AVAILABLE: "good", LOADING: "", START: "", UNLOADING: "idle", END: "idle" };

  class Card {
    constructor(name) {
      this.name = name;
      this.root = $("model").content.firstElementChild.cloneNode(true);
      this.find = (selector) => this.root.querySelector(selector);
      this.find("h2").textContent = name;
      this.seen = "";
      this.trial = null;
      this.find(".open").setAttribute("aria-label", `Try model ${name}`);
      this.find(".open").addEventListener("click", () => this.toggle());
    }

    show(model) {
      this.model = model;
      this.figures(model.traffic);
      const seen = JSON.stringify([model.versions, model.labels, model.error]);
      if (seen === this.seen) return;
      this.seen = seen;
      const chips = Object.entries(model.labels).map(([label, version]) => element("span", `${label} → ${version}`, "chip"));
      this.find(".labels").replaceChildren(...chips);
      this.find(".fault").hidden = !model.error;
      this.find(".fault").textContent = model.error || "";
      this.find("tbody").replaceChildren(...model.versions.flatMap((version) => this.rows(version)));
      this.find("table").hidden = model.versions.length === 0;
      this.find(".open").disabled = !this.available().length;
      if (this.trial) this.trial.versions();
    }

    available() {
      return this.model.versions.filter((version) => version.state === "AVAILABLE").map((version) => version.version);
    }

    figures(traffic) {
      const failed = traffic ? Object.values(traffic.failures).reduce((total, count) => total + count, 0) : 0;
      setText(this.find(".rate"), traffic ? rate(traffic.per_second) : "0");
      setText(this.find(".p50"), milliseconds(traffic && traffic.p50_ms));
      setText(this.find(".p99"), milliseconds(traffic && traffic.p99_ms));
      setText(this.find(".answers"), (traffic ? traffic.answers : 0).toLocaleString("en"));
      setText(this.find("dd.errors"), failed.toLocaleString("en"));
      this.find("dd.errors").classList.toggle("some", failed > 0);
      this.find(".codes").hidden = !failed;
      const codes = traffic ? Object.entries(traffic.failures).sort((one, other) => other[1] - one[1]) : [];
      setText(this.find(".codes"), codes.map(([code, count]) => `${count.toLocaleString("en")} × ${code}`).join(", "));
      sparkline(this.find(".spark"), traffic ? traffic.series : [], traffic ? traffic.failure_series : []);
      const peak = traffic ? Math.max(...traffic.series) : 0;
      setText(this.find(".peak"), peak ? `peak ${rate(peak)}/s` : "no requests");
    }

    rows(version) {
      const row = element("tr");
      const state = element("span", version.error ? "FAILED" : version.state, "pill");
      const style = version.error ? "bad" : STATES[version.state];
      if (style) state.classList.add(style);
      const number = element("span", version.version);
      const labels = Object.entries(this.model.labels).filter(([, one]) => one === version.version);
      const source = version.source || {};
      const cells = [
        ["Version", [number, ...labels.map(([label]) => element("span", label, "chip"))]],
        ["State", [state]],
        ["Layout", [version.layout || "–"]],
        ["Size", [bytes(version.bytes)]],
        ["Load time", [seconds(version.load_seconds)]],
        ["Checkpoint", [source.path || "–"]],
      ];
      for (const [label, content] of cells) {
        const cell = element("td");
        cell.dataset.label = label;
        const inner = element("span");
        inner.append(...content);
        cell.append(inner);
        row.append(cell);
      }
      row.lastElementChild.className = "path";
      if (version.path) row.title = version.path;
      const found = [row];
      if (version.error) found.push(this.below("why", element("p", version.error)));
      if (version.tables && version.tables.length) found.push(this.below("tables", tables(version)));
      return found;
    }

    below(className, content) {
      const row = element("tr", undefined, className);
      const cell = element("td");
      cell.colSpan = 6;
      cell.append(content);
      row.append(cell);
      return row;
    }

    toggle() {
      const panel = this.find(".try");
      panel.hidden = !panel.hidden;
      this.find(".open").setAttribute("aria-expanded", String(!panel.hidden));
      if (!this.trial) this.trial = new Trial(this, panel);
    }
  }

  function tables(version) {
    const details = element("details");
    const count = version.tables.length;
    details.append(element("summary", `${count} ${count === 1 ? "table" : "tables"}, written by tpuembed ${version.written_by}`));
    const list = element("ul");
    for (const table of version.tables) {
      list.append(element("li", `${table.name}: ${table.rows.toLocaleString("en")} × ${table.dim}, ${table.storage}`));
    }
    details.append(list);
    return details;
  }

  function sparkline(svg, answers, failures) {
    const peak = Math.max(1, ...answers);
    const points = (series) => series.map((value, at) => `${at * 150 / Math.max(1, series.length - 1)},${(39 - 37 * value / peak).toFixed(2)}`);
    const path = (className, data) => {
      const made = document.createElementNS(SVG, "path");
      made.setAttribute("class", className);
      made.setAttribute("d", data);
      return made;
    };
    const found = [];
    if (answers.some((value) => value > 0)) {
      const line = points(answers).join(" L");
      found.push(path("area", `M0,40 L${line} L150,40 Z`), path("line", `M${line}`));
      if (failures.some((value) => value > 0)) found.push(path("errors", `M0,39 L${points(failures).join(" L")} L150,39 Z`));
    }
    svg.replaceChildren(...found);
    const last = answers.length ? answers[answers.length - 1] : 0;
    svg.setAttribute("aria-label", `Requests per second in the last 5 minutes: now ${rate(last)}, peak ${rate(Math.max(0, ...answers))}`);
  }

  // ---- try it

  const DTYPES = { float: "float32", double: "float64", half: "float16" };

  class Trial {
    constructor(card, panel) {
      this.card = card;
      this.kind = "curl";
      this.edited = false;
      this.signatures = [];
      panel.append($("try").content.cloneNode(true));
      this.find = (selector) => panel.querySelector(selector);
      this.find("form").addEventListener("submit", (event) => {
        event.preventDefault();
        this.send();
      });
      this.find(".version").addEventListener("change", () => this.load());
      this.find(".signature").addEventListener("change", () => {
        this.edited = false;
        this.fill();
      });
      this.find(".other").addEventListener("change", () => this.snippet());
      this.find(".body").addEventListener("input", () => {
        this.edited = true;
        this.snippet();
      });
      for (const button of panel.querySelectorAll("[data-kind]")) {
        button.addEventListener("click", () => {
          this.kind = button.dataset.kind;
          for (const one of panel.querySelectorAll("[data-kind]")) one.setAttribute("aria-pressed", String(one === button));
          this.snippet();
        });
      }
      this.find(".copy").addEventListener("click", () => this.copy());
      this.versions();
    }

    /** Offers the versions that answer now. What is chosen stays chosen while it can. */
    versions() {
      const numbers = this.card.available();
      const labels = Object.entries(this.card.model.labels).filter(([, version]) => numbers.includes(version));
      const choices = [["", numbers.length ? `newest (${numbers[0]})` : "none available"]]
        .concat(numbers.map((number) => [`/versions/${number}`, number]))
        .concat(labels.map(([label, version]) => [`/labels/${encodeURIComponent(label)}`, `${label} (${version})`]));
      options(this.find(".version"), choices);
      options(this.find(".other"), [["none", "nothing"], ...choices.slice(1)]);
      this.load();
    }

    chosen() {
      const choice = this.find(".version").value;
      if (choice.startsWith("/versions/")) return choice.slice("/versions/".length);
      if (choice.startsWith("/labels/")) return this.card.model.labels[decodeURIComponent(choice.slice("/labels/".length))];
      return this.card.available()[0];
    }

    async load() {
      const version = this.chosen();
      if (version === undefined) return;
      if (version === this.loaded) {
        this.snippet();
        return;
      }
      try {
        const query = new URLSearchParams({ model: this.card.name, version });
        const answer = await read(`console/signatures?${query}`);
        const found = await answer.json();
        if (!answer.ok) throw new Error(found.error || `the server answered ${answer.status}`);
        this.signatures = found.signatures;
        this.loaded = version;
      } catch (error) {
        this.find(".describes").textContent = `The signatures of version ${version} cannot be read: ${error.message}`;
        return;
      }
      options(this.find(".signature"), this.signatures.map((one) => [one.name, one.name]));
      this.fill();
    }

    signature() {
      return this.signatures.find((one) => one.name === this.find(".signature").value);
    }

    fill() {
      const signature = this.signature();
      if (!signature) return;
      const side = (infos) => infos.map((one) => `${one.name}: ${one.dtype} ${shape(one.shape)}`).join(", ");
      this.find(".describes").textContent = `${side(signature.inputs) || "no input"}  →  ${side(signature.outputs)}`;
      if (!this.edited) {
        this.find(".body").value = signature.example === null ? template(signature) : signature.example;
      }
      this.snippet();
    }

    target(choice) {
      const signature = this.signature();
      return `v1/models/${encodeURIComponent(this.card.name)}${choice}:${signature ? signature.method : "predict"}`;
    }

    async send() {
      const button = this.find(".send");
      const other = this.find(".other").value;
      const choices = [this.find(".version").value, ...(other === "none" ? [] : [other])];
      const body = this.find(".body").value;
      button.disabled = true;
      const answers = [];
      for (const choice of choices) answers.push(await this.ask(choice, body)); // one by one: the durations compare
      button.disabled = false;
      this.showAnswers(answers);
    }

    async ask(choice, body) {
      const started = performance.now();
      try {
        const method = { method: "POST", headers: headers({ "Content-Type": "application/json" }), body, cache: "no-store" };
        const answer = await fetch(this.target(choice), method);
        const text = await answer.text();
        return { title: this.title(choice), status: answer.status, ok: answer.ok, text, duration: performance.now() - started };
      } catch {
        return { title: this.title(choice), status: "no connection", ok: false, text: "The server does not answer.", duration: performance.now() - started };
      }
    }

    title(choice) {
      return [...this.find(".version").options].find((one) => one.value === choice).textContent;
    }

    showAnswers(answers) {
      const [one, other] = answers;
      const differences = other && one.ok && other.ok ? compare(one.text, other.text) : null;
      const columns = answers.map((answer, at) => {
        const column = element("div");
        const line = element("div", undefined, "bar");
        if (other) line.append(element("strong", `version ${answer.title}`));
        line.append(element("span", String(answer.status), `pill ${answer.ok ? "good" : "bad"} status`));
        line.append(element("span", milliseconds(answer.duration), "quiet duration"));
        const shown = element("pre");
        shown.tabIndex = 0;
        if (differences && differences.marked) shown.append(...differences.marked[at]);
        else shown.textContent = answer.text.slice(0, MOST_SHOWN);
        column.append(line, shown);
        if (answer.text.length > MOST_SHOWN) column.append(element("p", `The first ${MOST_SHOWN} of ${answer.text.length} characters.`, "quiet"));
        return column;
      });
      const note = differences ? [element("p", differences.note, "note")] : [];
      this.find(".answers-of").classList.toggle("two", columns.length > 1);
      this.find(".answers-of").replaceChildren(...note, ...columns);
    }

    snippet() {
      if (!this.signature()) return;
      const choice = this.find(".version").value;
      this.find(".target").textContent = `POST /${this.target(choice)}`;
      const make = { curl: curlSnippet, python: pythonSnippet, grpc: grpcSnippet }[this.kind];
      const url = new URL(this.target(choice), document.baseURI).href;
      this.find(".snippet").textContent = make({
        url,
        choice,
        body: this.find(".body").value,
        model: this.card.name,
        signature: this.signature(),
      });
    }

    async copy() {
      const button = this.find(".copy");
      const shown = this.find(".snippet");
      try {
        await navigator.clipboard.writeText(shown.textContent);
        button.textContent = "Copied";
      } catch { // browsers allow it on https and localhost alone
        getSelection().selectAllChildren(shown);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    }
  }

  function options(select, choices) {
    const before = select.value;
    if (JSON.stringify([...select.options].map((one) => [one.value, one.textContent])) === JSON.stringify(choices)) return;
    select.replaceChildren(...choices.map(([value, text]) => {
      const option = element("option", text);
      option.value = value;
      return option;
    }));
    if (choices.some(([value]) => value === before)) select.value = before;
  }

  function shape(sizes) {
    return sizes === null ? "any shape" : `[${sizes.map((size) => (size < 0 ? "?" : size)).join(", ")}]`;
  }

  /** A form to fill in, where neither a recorded request nor the signature gives an example. */
  function template(signature) {
    const head = signature.name === "serving_default" ? {} : { signature_name: signature.name };
    if (signature.method !== "predict") return JSON.stringify({ ...head, examples: [{}] });
    return JSON.stringify({ ...head, inputs: Object.fromEntries(signature.inputs.map((one) => [one.name, []])) });
  }

  /** Compares two answers token by token, as they were sent: no number is rounded on its way. */
  function compare(one, other) {
    const token = /"(?:[^"\\]|\\.)*"|[^\s"[\]{},:]+|[[\]{},:]|\s+/g;
    const [left, right] = [one, other].map((text) => text.match(token) || []);
    const isText = (part) => /^\s/.test(part);
    const [values, others] = [left, right].map((parts) => parts.filter((part) => !isText(part)));
    const structure = (parts) => parts.map((part) => (/^[[\]{},:]$/.test(part) ? part : "v")).join("");
    if (structure(values) !== structure(others)) return { note: "The answers have different shapes.", marked: null };
    const differ = values.map((part, at) => part !== others[at]);
    const count = differ.filter(Boolean).length;
    if (one.length > MOST_SHOWN || other.length > MOST_SHOWN) return { note: `${count} values differ.`, marked: null };
    const marked = [left, right].map((parts) => {
      let at = 0;
      return parts.map((part) => (isText(part) || !differ[at++] ? document.createTextNode(part) : element("mark", part)));
    });
    return { note: count ? `${count} ${count === 1 ? "value differs" : "values differ"}, marked below.` : "The answers are the same.", marked };
  }

  // ---- snippets. The body stays as it was typed.

  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

  function curlSnippet({ url, body }) {
    const secret = server.keys ? ' \\\n  -H "X-API-Key: $API_KEY"' : "";
    return `curl ${quoted(url)}${secret} \\\n  -d ${quoted(body)}`;
  }

  function pythonSnippet({ url, body }) {
    const secret = server.keys ? ', "X-API-Key": os.environ["API_KEY"]' : "";
    return [
      `import json${server.keys ? "\nimport os" : ""}\nimport urllib.request`,
      "",
      `url = ${JSON.stringify(url)}`,
      `body = ${JSON.stringify(body)}`,
      `headers = {"Content-Type": "application/json"${secret}}`,
      "request = urllib.request.Request(url, body.encode(), headers)",
      "with urllib.request.urlopen(request) as answer:",
      "    print(json.load(answer))",
    ].join("\n");
  }

  function grpcSnippet({ choice, body, model, signature }) {
    if (!server.grpc_port) return "This server runs without gRPC.";
    if (signature.method !== "predict") return "The snippet is for signatures of predict. This one is asked by tf.Examples: see the API docs.";
    let parsed;
    try {
      parsed = JSON.parse(body);
    } catch {
      return "The request is not JSON yet.";
    }
    const rows = parsed.instances;
    const isNamed = rows ? rows[0] !== null && typeof rows[0] === "object" && !Array.isArray(rows[0]) && !("b64" in rows[0])
      : parsed.inputs !== null && typeof parsed.inputs === "object" && !Array.isArray(parsed.inputs) && !("b64" in parsed.inputs);
    const only = signature.inputs.length === 1 ? JSON.stringify(signature.inputs[0].name) : '"NAME"';
    const columns = rows
      ? isNamed ? '{name: [row[name] for row in body["instances"]] for name in body["instances"][0]}' : `{${only}: body["instances"]}`
      : isNamed ? 'body["inputs"]' : `{${only}: body["inputs"]}`;
    const hasBytes = body.includes('"b64"');
    const decode = hasBytes ? ', object_hook=lambda one: base64.b64decode(one["b64"]) if one.keys() == {"b64"} else one' : "";
    const version = choice.startsWith("/versions/")
      ? `request.model_spec.version.value = ${choice.slice("/versions/".length)}`
      : choice.startsWith("/labels/") ? `request.model_spec.version_label = ${JSON.stringify(decodeURIComponent(choice.slice("/labels/".length)))}` : "";
    const dtypes = signature.inputs.map((one) => `${JSON.stringify(one.name)}: "${DTYPES[one.dtype] || one.dtype}"`).join(", ");
    const address = JSON.stringify(`${location.hostname}:${server.grpc_port}`);
    return [
      [hasBytes && "import base64", "import json", server.keys && "import os"].filter(Boolean).join("\n"),
      "",
      "import grpc",
      "import tensorflow as tf",
      "from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc",
      "",
      `body = json.loads(${JSON.stringify(body)}${decode})`,
      `columns = ${columns}`,
      `dtypes = {${dtypes}}`,
      "request = predict_pb2.PredictRequest()",
      `request.model_spec.name = ${JSON.stringify(model)}`,
      version,
      `request.model_spec.signature_name = ${JSON.stringify(signature.name)}`,
      "for name, values in columns.items():",
      "    request.inputs[name].CopyFrom(tf.make_tensor_proto(values, dtypes[name]))",
      server.tls ? `channel = grpc.secure_channel(${address}, grpc.ssl_channel_credentials())` : `channel = grpc.insecure_channel(${address})`,
      "stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)",
      server.keys ? 'metadata = [("x-api-key", os.environ["API_KEY"])]' : "",
      `print(stub.Predict(request, timeout=10${server.keys ? ", metadata=metadata" : ""}))`,
    ].filter((line, at) => line !== "" || at === 1 || at === 5).join("\n");
  }

  poll();
})();
