// Elements and words. Whatever comes from the service is set as text, never as markup.

export const at = (id) => document.getElementById(id);

/** An element with properties, and with children that are elements or plain text. */
export function make(tag, properties = {}, ...children) {
  const found = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key in found) found[key] = value;
    else found.setAttribute(key, value);
  }
  found.append(...children);
  return found;
}

/** Text is touched only where it changes: screen readers and selections stay undisturbed. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function mark(element, key, value) {
  if (element.dataset[key] !== value) element.dataset[key] = value;
}

export function show(element, shown) {
  if (element.hidden === shown) element.hidden = !shown;
}

/** Children of `parent`, one for each item and in their order; those that stay are kept. */
export function keyed(parent, items, keyOf, create, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = old.get(key);
    old.delete(key);
    if (!child) {
      child = create(item);
      child.dataset.key = key;
    }
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    update?.(child, item);
  }
  for (const child of old.values()) child.remove();
}

const SCALES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k", 1e3]];

/** A number for a person: four digits, then k, M, G, T. */
export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  for (const [from, letter, unit = from] of SCALES) {
    if (Math.abs(value) >= from) return `${digits(value / unit)} ${letter}`;
  }
  return digits(value);
}

function digits(value) {
  if (Number.isInteger(value)) return String(value);
  return Math.abs(value) >= 0.001 ? String(Number(value.toPrecision(4))) : value.toExponential(2);
}

export const clock = (when) => new Date(when).toLocaleTimeString([], { hour12: false });

export function span(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}
