// Shows the newest of every section. All text in them was escaped where it was made, and the
// page's policy lets no script but this one run.
"use strict";
const banner = document.getElementById("link");
let source = null;
let heard = null;

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

function tell(text) {
  banner.hidden = !text;
  banner.textContent = text;
}

function open() {
  if (source) return;
  source = new EventSource("events");
  source.onmessage = (message) => {
    heard = new Date();
    tell("");
    for (const [name, html] of Object.entries(JSON.parse(message.data))) show(name, html);
    document.body.dataset.heard = "yes";
  };
  source.onerror = () => {
    const since = heard ? ": what is shown is of " + heard.toLocaleTimeString() : "";
    tell("Nobody serves this page at the moment" + since);
    if (source && source.readyState === EventSource.CLOSED) {
      source = null;
      setTimeout(open, 3000);
    }
  };
}

// A page that nobody sees costs nothing.
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) open();
  else if (source) {
    source.close();
    source = null;
  }
});
if (!document.hidden) open();
