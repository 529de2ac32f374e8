// Shows the newest version of every section. The server escapes all text, and the page's
// policy allows no other script.
"use strict";
const banner = document.getElementById("link");
let source = null;
let receivedAt = null;

function show(name, html) {
  const place = document.getElementById(name);
  if (!place) return;
  const boxes = () => [...place.querySelectorAll(".scroll, .pan")];
  const scrolled = boxes().map((box) => [box.scrollLeft, box.scrollTop]);
  place.innerHTML = html;
  boxes().forEach((box, i) => {
    if (scrolled[i]) [box.scrollLeft, box.scrollTop] = scrolled[i];
  });
  if (name === "head") {
    const title = place.querySelector("h1");
    if (title) document.title = title.textContent.trim() + " - geo_ray";
  }
}

function notify(text) {
  banner.hidden = !text;
  banner.textContent = text;
}

function open() {
  if (source) return;
  source = new EventSource("events");
  source.onmessage = (message) => {
    receivedAt = new Date();
    notify("");
    for (const [name, html] of Object.entries(JSON.parse(message.data))) show(name, html);
    document.body.dataset.heard = "yes";
  };
  source.onerror = () => {
    const since = receivedAt ? ": the content is of " + receivedAt.toLocaleTimeString() : "";
    notify("This page is not being served" + since);
    if (source && source.readyState === EventSource.CLOSED) {
      source = null;
      setTimeout(open, 3000);
    }
  };
}

// A hidden page closes its connection.
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) open();
  else if (source) {
    source.close();
    source = null;
  }
});
if (!document.hidden) open();
