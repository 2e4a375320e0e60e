"use strict";
// Shows openapi.json. The key stays in this page's memory, and is sent as a header.
(() => {
  const login = document.getElementById("login");
  const refusal = document.getElementById("refusal");

  async function show(key) {
    const answer = await fetch("openapi.json", { headers: key ? { "X-API-Key": key } : {}, cache: "no-store" });
    if (answer.status === 401) {
      refusal.textContent = key ? "The server refused this key." : "";
      login.hidden = false;
      document.getElementById("key").focus();
      return;
    }
    login.hidden = true;
    const ui = SwaggerUIBundle({
      spec: await answer.json(),
      dom_id: "#swagger-ui",
      deepLinking: true,
      presets: [SwaggerUIBundle.presets.apis, SwaggerUIBundle.SwaggerUIStandalonePreset],
      onComplete: () => key && ui.preauthorizeApiKey("ApiKey", key),
    });
  }

  login.addEventListener("submit", (event) => {
    event.preventDefault();
    const key = document.getElementById("key").value.trim();
    if (!/^[!-~]+$/.test(key)) {
      refusal.textContent = "A key has no spaces, and ASCII characters only.";
      return;
    }
    show(key);
  });
  show("");
})();
