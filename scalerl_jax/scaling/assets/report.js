// Draws every `section.curves` of the page from the JSON inside it: panels of
// the curve, its residuals and the forecast from the first half, with a
// compute axis that is linear or logarithmic and runs that go on and off.
"use strict";
(() => {
  const SVG = new DOMParser().parseFromString("<svg></svg>", "text/html")
    .body.firstChild.namespaceURI;
  const MARGIN = { top: 10, right: 14, bottom: 40, left: 58 };
  const ZERO = 26; // room for compute 0 beside a logarithmic axis
  const SHAPES = [
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-3.6-3.6h7.2v7.2h-7.2z",
    "M0-4.8L4.6 3.4h-9.2z",
    "M0-5L5 0L0 5L-5 0z",
  ];
  const KINDS = {
    curve: { height: 360, label: "pass rate" },
    residuals: { height: 190, label: "measured − fitted" },
    backtest: { height: 300, label: "pass rate" },
  };

  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      node.setAttribute(name, value);
    }
    node.append(...children);
    return node;
  }

  function mark(parent, tag, attributes) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) {
      node.setAttribute(name, value);
    }
    return parent.appendChild(node);
  }

  const color = (index) => `var(--run-${index % 8})`;
  const rate = (value) => value.toFixed(4);

  function amount(value) {
    const size = Math.abs(value);
    if (size !== 0 && (size >= 1e7 || size < 1e-3)) {
      return value.toExponential(3).replace(/\.?0*e\+?/, "e");
    }
    return value.toLocaleString("en", { maximumSignificantDigits: 5 });
  }

  // Ticks.

  function linearTicks(low, high, count) {
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((m) => m * power >= rough) * power;
    const ticks = [];
    for (let k = Math.ceil(low / step); k * step <= high; k++) {
      ticks.push(Number((k * step).toPrecision(12)));
    }
    return ticks;
  }

  function logTicks(low, high) {
    const decades = Math.log10(high / low);
    const steps =
      decades > 4 ? [1] : decades > 1.2 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 7];
    const ticks = [];
    for (let d = Math.floor(Math.log10(low)); 10 ** d <= high; d++) {
      for (const step of steps) {
        const tick = Number((step * 10 ** d).toPrecision(12));
        if (tick >= low && tick <= high) ticks.push(tick);
      }
    }
    return ticks;
  }

  // What a panel shows of a run: points, line and band, or null.

  function view(run, kind) {
    const source = kind === "backtest" ? run.backtest : run;
    if (!source) return null;
    const flat = kind === "residuals";
    const points = run.x.map((x, i) => ({
      x,
      y: flat ? run.y[i] - source.mean[i] : run.y[i],
      rate: run.y[i],
      mean: source.mean[i],
      low: source.low[i],
      high: source.high[i],
      fitted: source.fitted[i],
    }));
    const { grid } = source;
    const line = flat
      ? points.map(({ x, mean, low, high }) => (
        { x, mean: 0, low: low - mean, high: high - mean }
      ))
      : grid.x.map((x, i) => (
        { x, mean: grid.mean[i], low: grid.low[i], high: grid.high[i] }
      ));
    return {
      points,
      line,
      last: source.last,
      asymptote: flat ? null : source.asymptote,
      forecasts: flat ? [] : source.forecasts,
      measured: kind === "backtest" ? source.measured : null,
    };
  }

  // All panels have the same compute axis: that of the runs shown.
  function scales(runs, views, log, width, height, flat) {
    const computes = runs.flatMap((run) => run.x.concat(run.grid.x));
    const positive = computes.filter((x) => x > 0);
    const high = Math.max(...positive) * 1.02;
    const low = log ? Math.min(...positive) / 1.05 : 0;
    const zero = log && runs.some((run) => run.x.includes(0));
    const left = MARGIN.left + (zero ? ZERO : 0);
    const right = width - MARGIN.right;
    const share = log
      ? (x) => Math.log(x / low) / Math.log(high / low)
      : (x) => x / high;
    const x = (value) =>
      value > 0 ? left + share(value) * (right - left)
      : log ? MARGIN.left + 8 : left;

    const values = views.flatMap((v) => [
      ...v.points.map((p) => p.y),
      ...v.line.flatMap((p) => [p.low, p.high]),
    ]);
    let bottom = Math.min(...values);
    let top = Math.max(...values);
    if (flat) {
      top = Math.max(top, -bottom);
      bottom = -top;
    }
    const room = 0.05 * (top - bottom || 0.1);
    [bottom, top] = [bottom - room, top + room];
    const floor = height - MARGIN.bottom;
    const y = (value) =>
      floor - ((value - bottom) / (top - bottom)) * (floor - MARGIN.top);
    const count = Math.max(2, Math.floor((right - left) / 90));
    return {
      x, y, left, right, floor, zero,
      xTicks: log ? logTicks(low, high) : linearTicks(low, high, count),
      yTicks: linearTicks(bottom, top, height > 200 ? 6 : 4),
    };
  }

  function drawAxes(svg, scale, kind, unit) {
    const text = (x, y, words, more) => {
      mark(svg, "text", { x, y, ...more }).textContent = words;
    };
    for (const tick of scale.yTicks) {
      const y = scale.y(tick);
      const ends = { x1: MARGIN.left, x2: scale.right, y1: y, y2: y };
      mark(svg, "line", { class: "grid", ...ends });
      text(MARGIN.left - 6, y + 4, String(tick), { "text-anchor": "end" });
    }
    let free = -Infinity;
    const ticks = (scale.zero ? [0] : []).concat(scale.xTicks);
    for (const tick of ticks) {
      const x = scale.x(tick);
      const words = amount(tick);
      const half = words.length * 3.6;
      if (x - half < free || x + half > scale.right + MARGIN.right) continue;
      free = x + half + 6;
      const ends = { x1: x, x2: x, y1: scale.floor, y2: scale.floor + 4 };
      mark(svg, "line", { class: "guide", ...ends });
      const more = { class: "tick", "text-anchor": "middle" };
      text(x, scale.floor + 17, words, more);
    }
    const middle = (MARGIN.left + scale.right) / 2;
    const name = unit ? `compute (${unit})` : "compute";
    text(middle, scale.floor + 34, name, { "text-anchor": "middle" });
    const turned = `translate(12 ${scale.floor / 2}) rotate(-90)`;
    const more = { transform: turned, "text-anchor": "middle" };
    text(0, 0, KINDS[kind].label, more);
  }

  function drawRun(svg, scale, shown, index, log) {
    const line = shown.line.filter((p) => !log || p.x > 0);
    const at = (name) => line.map((p) => `${scale.x(p.x)} ${scale.y(p[name])}`);
    const paint = { stroke: color(index), fill: "none" };
    const band = `M${at("low").join("L")}L${at("high").reverse().join("L")}Z`;
    mark(svg, "path", { class: "band", d: band, fill: color(index) });
    mark(svg, "path", { class: "mean", d: `M${at("mean").join("L")}`, ...paint });
    if (shown.points.some((p) => !p.fitted && p.x > shown.last)) {
      const x = scale.x(shown.last);
      const ends = { x1: x, x2: x, y1: MARGIN.top, y2: scale.floor };
      mark(svg, "line", { class: "guide", ...ends });
    }
    if (shown.asymptote !== null) {
      const y = scale.y(shown.asymptote);
      if (y >= MARGIN.top && y <= scale.floor) {
        const ends = { x1: scale.left, x2: scale.right, y1: y, y2: y };
        mark(svg, "line", { class: "ceiling", ...ends, ...paint });
      }
    }
    for (const p of shown.points) {
      mark(svg, "path", {
        class: "point",
        d: SHAPES[index % SHAPES.length],
        transform: `translate(${scale.x(p.x)} ${scale.y(p.y)})`,
        stroke: color(index),
        fill: p.fitted ? color(index) : "var(--paper)",
      });
    }
    for (const { x, mean, low, high } of shown.forecasts) {
      const [left, low_, high_] = [scale.x(x), scale.y(low), scale.y(high)];
      const d = `M${left} ${low_}V${high_}M${left - 6} ${low_}h12` +
        `M${left - 6} ${high_}h12M${left - 9} ${scale.y(mean)}h18`;
      mark(svg, "path", { class: "forecast", d, ...paint });
    }
    if (shown.measured !== null) {
      mark(svg, "circle", {
        class: "measured",
        cx: scale.x(shown.forecasts[0].x),
        cy: scale.y(shown.measured),
        r: 6,
        fill: "none",
        stroke: color(index),
        "stroke-width": 2.5,
      });
    }
  }

  function panel(data, state, kind) {
    const svg = document.createElementNS(SVG, "svg");
    const tip = make("div", { class: "tip", role: "status" });
    const node = make("div", { class: `panel ${kind}` }, svg, tip);
    svg.setAttribute("tabindex", "0");
    svg.setAttribute("role", "application");
    svg.setAttribute("aria-roledescription", "chart");
    const about = `${KINDS[kind].label} against compute`;
    svg.setAttribute("aria-label", `${about}; arrow keys read the points`);
    let places = []; // of the points drawn, run by run
    let chosen = null;

    function choose(place) {
      chosen?.ring.remove();
      chosen = place;
      tip.textContent = "";
      if (!place) return;
      const { x, y, run, point } = place;
      const ring = { class: "chosen", cx: x, cy: y, r: 8 };
      place.ring = mark(svg, "circle", ring);
      const level = `${Math.round(100 * data.level)} %`;
      tip.textContent = [
        run.name,
        `compute ${amount(point.x)}${data.unit ? ` (${data.unit})` : ""}`,
        `pass rate ${rate(point.rate)}`,
        `fitted mean ${rate(point.mean)}`,
        `${level} band ${rate(point.low)} to ${rate(point.high)}`,
        point.fitted ? "fitted" : "not shown to the fit",
      ].join("\n");
      const { offsetWidth: width } = tip;
      const right = x + 14 + width <= node.clientWidth;
      tip.style.left = `${Math.max(0, right ? x + 14 : x - 14 - width)}px`;
      tip.style.top = `${Math.max(0, y - tip.offsetHeight / 2)}px`;
    }

    function nearest(event) {
      const box = svg.getBoundingClientRect();
      const [x, y] = [event.clientX - box.left, event.clientY - box.top];
      const far = (p) => Math.hypot(p.x - x, p.y - y);
      choose(places.reduce((a, b) => (a && far(a) <= far(b) ? a : b), null));
    }

    function step(event) {
      const here = places.indexOf(chosen);
      const run = chosen ? chosen.index : -1;
      const first = (wanted) => places.find((p) => p.index === wanted);
      const runs = [...new Set(places.map((p) => p.index))];
      const beside = (by) => first(runs[runs.indexOf(run) + by]) ?? chosen;
      const goes = {
        ArrowRight: () => places[Math.min(here + 1, places.length - 1)],
        ArrowLeft: () => places[Math.max(here - 1, 0)],
        ArrowDown: () => beside(1),
        ArrowUp: () => beside(-1),
        Escape: () => null,
      }[event.key];
      if (!goes || !places.length) return;
      event.preventDefault();
      choose(goes());
    }

    function draw() {
      choose(null);
      const width = Math.max(280, node.clientWidth);
      const height = KINDS[kind].height;
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.setAttribute("height", height);
      svg.replaceChildren();
      const views = data.runs.map((run, index) => ({
        run, index, shown: state.on[index] ? view(run, kind) : null,
      })).filter((v) => v.shown);
      places = [];
      if (!views.length) return;
      const flat = kind === "residuals";
      const runs = data.runs.filter((_, index) => state.on[index]);
      const all = views.map((v) => v.shown);
      const scale = scales(runs, all, state.log, width, height, flat);
      drawAxes(svg, scale, kind, data.unit);
      for (const { run, index, shown } of views) {
        drawRun(svg, scale, shown, index, state.log);
        places.push(...shown.points.map((point) => ({
          x: scale.x(point.x), y: scale.y(point.y), run, index, point,
        })));
      }
    }

    svg.addEventListener("pointermove", nearest);
    svg.addEventListener("pointerdown", nearest);
    svg.addEventListener("pointerleave", () => choose(null));
    svg.addEventListener("keydown", step);
    svg.addEventListener("blur", () => choose(null));
    return { node, draw };
  }

  function axisChoice(state, name, redraw) {
    const set = make("fieldset", {}, make("legend", {}, "compute axis"));
    for (const [value, log] of [["logarithmic", true], ["linear", false]]) {
      const input = make("input", { type: "radio", name, value });
      input.checked = log === state.log;
      input.addEventListener("change", () => {
        state.log = log;
        redraw();
      });
      set.append(make("label", {}, input, ` ${value}`));
    }
    return set;
  }

  function legend(data, state, redraw) {
    const list = make("div", { class: "legend", role: "group" });
    list.setAttribute("aria-label", "runs shown");
    data.runs.forEach((run, index) => {
      const swatch = document.createElementNS(SVG, "svg");
      swatch.setAttribute("viewBox", "-6 -6 12 12");
      swatch.setAttribute("aria-hidden", "true");
      const d = SHAPES[index % SHAPES.length];
      mark(swatch, "path", { d, fill: color(index) });
      const button = make("button", { type: "button" }, swatch, run.name);
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        state.on[index] = !state.on[index];
        button.setAttribute("aria-pressed", String(state.on[index]));
        redraw();
      });
      list.append(button);
    });
    return list;
  }

  document.querySelectorAll("section.curves").forEach((section, number) => {
    const data = JSON.parse(section.querySelector("script").textContent);
    const state = { log: true, on: data.runs.map(() => true) };
    const panels = [];
    const redraw = () => panels.forEach((p) => p.draw());
    section.querySelectorAll("[data-panel]").forEach((place) => {
      panels.push(panel(data, state, place.dataset.panel));
      place.prepend(panels.at(-1).node);
      place.hidden = false;
    });
    section.querySelector(".still").remove();
    section.prepend(make(
      "div",
      { class: "controls" },
      axisChoice(state, `axis-${number}`, redraw),
      legend(data, state, redraw),
    ));
    redraw();
    new ResizeObserver(redraw).observe(section);
  });
})();
