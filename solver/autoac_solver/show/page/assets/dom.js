// Creating and filling elements. Text is always inserted as text, never as markup.

document.body.classList.remove("still"); // first, because hidden elements cannot be measured

const byId = (id) => document.getElementById(id);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** An HTML element; strings among the children become text. */
const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

/** An SVG element. */
const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

/** Replaces an element's children. */
const show = (element, ...children) => element.replaceChildren(...children);

/** Text that may break after the dots and underscores of a name. */
const breakable = (text) => (text.match(/[^._]*[._]+|[^._]+/g) ?? []).flatMap((part, i) => (i ? [make("wbr"), part] : [part]));

/** A small square in the colour of a class. */
const swatch = (kind) =>
  draw("svg", { class: "swatch", viewBox: "0 0 12 12", "aria-hidden": "true" },
    draw("rect", { class: kind, width: 12, height: 12, rx: 3 }));

/** Runs a function once at the next frame, however often it was requested. */
function atNextFrame(run) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      run();
    });
  };
}

/** Runs a function after no request for it has come for a while. */
function whenQuiet(run, milliseconds) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(run, milliseconds);
  };
}
