// Readable numbers, with the same digits as format.py.

/** Significant digits without zeros at the end. */
const digits = (value, n) => String(Number(value.toPrecision(n)));

/** Bytes in powers of 1000: "202 MB". */
function formatBytes(bytes) {
  if (Math.abs(bytes) < 1000) return `${bytes} byte${Math.abs(bytes) === 1 ? "" : "s"}`;
  let value = bytes / 1000;
  let letter = 0;
  while (Math.abs(Number(value.toPrecision(4))) >= 1000 && letter < 3) {
    value /= 1000;
    letter += 1;
  }
  return `${Math.abs(value) < 9999 ? digits(value, 4) : value.toFixed(0)} ${"KMGT"[letter]}B`;
}

/** Seconds to three digits: "12.3 ms". */
function formatSeconds(seconds) {
  if (Math.abs(seconds) >= 120) return `${Math.floor(Math.round(seconds) / 60)} min ${Math.round(seconds) % 60} s`;
  if (Math.abs(seconds) >= 1) return `${digits(seconds, 3)} s`;
  if (Math.abs(seconds) * 1e3 >= 1) return `${digits(seconds * 1e3, 3)} ms`;
  return seconds ? `${digits(seconds * 1e6, 3)} µs` : "0 s";
}

/** Exact bytes, for titles. */
const exactBytes = (bytes) => `${bytes.toLocaleString("en")} bytes`;

const formatPercent = (fraction, decimals = 1) => `${(100 * fraction).toFixed(decimals)}%`;

const formatCount = (n) => n.toLocaleString("en");

const plural = (n, word) => `${formatCount(n)} ${word}${n === 1 ? "" : "s"}`;
