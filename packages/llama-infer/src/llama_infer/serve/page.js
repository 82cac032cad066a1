"use strict";
const $ = (id) => document.getElementById(id);
const chat = $("chat"), text = $("text");
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
let messages = []; // what has been said, as the API wants it
let running = null; // the AbortController of the answer that comes in

// --- words and code: everything a model writes becomes text nodes, never HTML

function element(tag, className, content) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (content !== undefined) made.textContent = content;
  return made;
}

function inline(parent, words) {
  for (const part of words.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/)) {
    if (part.length > 2 && part.startsWith("`") && part.endsWith("`")) parent.append(element("code", "", part.slice(1, -1)));
    else if (part.length > 4 && part.startsWith("**") && part.endsWith("**")) parent.append(element("strong", "", part.slice(2, -2)));
    else parent.append(part);
  }
}

function show(parent, words) {
  parent.replaceChildren();
  const parts = words.split(/^ {0,3}```([^\n`]*)\n?/m); // words, language, code, (language of the closing fence), words, …
  for (let at = 0; at < parts.length; at += 4) {
    inline(parent, parts[at]);
    if (at + 2 >= parts.length) break;
    const block = element("div", "block");
    const pre = element("pre"), code = element("code", "", parts[at + 2]);
    code.dataset.language = parts[at + 1].trim();
    pre.tabIndex = 0; // scrolls with the keyboard
    pre.append(code);
    block.append(pre, copyButton(() => code.textContent));
    parent.append(block);
  }
}

function copyButton(content) {
  const button = element("button", "copy", "Copy");
  button.type = "button";
  button.onclick = async () => {
    try {
      await navigator.clipboard.writeText(content());
    } catch { // no clipboard on a page that came without TLS
      const area = element("textarea", "", content());
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };
  return button;
}

function turn(role, words) {
  $("welcome").hidden = true;
  const article = element("article", role), body = element("div", "words"), note = element("div", "note");
  article.setAttribute("aria-label", role === "user" ? "You" : "Answer");
  show(body, words);
  article.append(body, note);
  chat.append(article);
  chat.scrollTop = chat.scrollHeight;
  return { article, body, note };
}

// --- asking

function settings() {
  const found = {};
  for (const name of NUMBERS) if ($(name).value !== "") found[name] = Number($(name).value);
  return found;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const data = JSON.parse(line.slice(6));
      if (data.error) throw new Error(data.error.message);
      yield data;
    }
  }
}

async function answer() {
  const { body, note } = turn("assistant", "");
  const system = $("system").value.trim();
  const sent = system ? [{ role: "system", content: system }, ...messages] : messages;
  const headers = { "content-type": "application/json" };
  if ($("key").value) headers.authorization = `Bearer ${$("key").value}`;
  let words = "", tokens = 0, first = 0, last = 0, reason = "", drawn = true, over = false;
  const begun = performance.now();
  const speed = () => {
    if (!first) return "…";
    const rate = tokens > 1 ? `, ${((tokens - 1) / Math.max((last - first) / 1000, 1e-6)).toFixed(1)} tokens/s` : "";
    return `${tokens} tokens, first after ${((first - begun) / 1000).toFixed(2)} s${rate}${reason}`;
  };
  const draw = () => {
    drawn = true;
    const below = chat.scrollHeight - chat.scrollTop - chat.clientHeight < 60; // else the reader is elsewhere
    show(body, words);
    note.textContent = speed();
    if (below) chat.scrollTop = chat.scrollHeight;
  };
  const own = running = new AbortController();
  busy(true);
  try {
    const asked = { messages: sent, stream: true, stream_options: { include_usage: true }, ...settings() };
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers, body: JSON.stringify(asked), signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const data of events(response)) {
      if (data.usage) tokens = data.usage.completion_tokens;
      for (const choice of data.choices) {
        if (choice.delta.content) {
          words += choice.delta.content;
          tokens += 1;
          last = performance.now();
          first = first || last;
          if (drawn) { drawn = false; requestAnimationFrame(() => over || draw()); }
        }
        if (choice.finish_reason === "length") reason = ", at the limit";
      }
    }
  } catch (error) {
    if (error.name === "AbortError") reason = ", stopped";
    else note.append(element("span", "wrong", error.message));
  }
  over = true;
  const failed = note.querySelector(".wrong");
  draw();
  if (failed) note.replaceChildren(failed);
  if (own === running) {
    running = null;
    busy(false);
    if (words) messages.push({ role: "assistant", content: words });
  }
  note.append(copyButton(() => words));
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  chat.setAttribute("aria-busy", String(is));
}

function ask() {
  const words = text.value.trim();
  if (!words || running) return;
  const previous = messages.at(-1);
  if (previous && previous.role === "user") messages.pop(); // it was never answered
  messages.push({ role: "user", content: words });
  turn("user", words);
  text.value = "";
  grow();
  answer();
}

function stop() {
  if (running) running.abort();
}

function anew() {
  stop();
  running = null;
  busy(false);
  messages = [];
  for (const article of chat.querySelectorAll("article")) article.remove();
  $("welcome").hidden = false;
  text.focus();
}

// --- the page

function grow() {
  text.rows = Math.min(10, text.value.split("\n").length);
}

function theme(name) {
  document.documentElement.dataset.theme = name;
}

function remembered(store, name, value) { // a browser may forbid it
  try {
    if (value === undefined) return store().getItem(name);
    store().setItem(name, value);
  } catch { /* then nothing is remembered */ }
  return null;
}

const kept = () => localStorage, forTheTab = () => sessionStorage;
for (const name of ["system", ...NUMBERS, "key"]) {
  const store = name === "key" ? forTheTab : kept;
  $(name).value = remembered(store, `llama-${name}`) || "";
  $(name).addEventListener("input", () => remembered(store, `llama-${name}`, $(name).value));
}
theme(remembered(kept, "llama-theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
$("theme").onclick = () => {
  theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  remembered(kept, "llama-theme", document.documentElement.dataset.theme);
};
$("settings-button").onclick = () => {
  $("settings").hidden = !$("settings").hidden;
  $("settings-button").setAttribute("aria-expanded", String(!$("settings").hidden));
  if (!$("settings").hidden) $("system").focus();
};
$("settings").onsubmit = (event) => event.preventDefault();
$("new").onclick = anew;
$("stop").onclick = stop;
$("ask").onsubmit = (event) => { event.preventDefault(); ask(); };
text.addEventListener("input", grow);
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
});
document.addEventListener("keydown", (event) => {
  const typing = /^(INPUT|TEXTAREA)$/.test(document.activeElement.tagName);
  if (event.key === "Escape") stop();
  else if (event.altKey && event.code === "KeyN") { event.preventDefault(); anew(); }
  else if (event.key === "/" && !typing) { event.preventDefault(); text.focus(); }
});
