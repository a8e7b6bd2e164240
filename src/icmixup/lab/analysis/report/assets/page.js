// Between two classes, which has a slider, and what starts the page.

const mixing = { pair: 0, lam: 0.5, charts: [], captions: [] };

function buildBetween() {
  const { between } = data;
  const box = at("between-body");
  if (between.reason) { box.replaceChildren(empty(`This section is empty: ${between.reason}.`)); return; }
  const choices = between.pairs.map((pair, k) => {
    const input = html("input", { type: "radio", name: "pair", value: k, checked: k === 0 });
    input.addEventListener("change", () => { mixing.pair = k; choosePair(); });
    return html("label", {}, input, html("span", {}, ...soft(`${pair.classes[0]} and ${pair.classes[1]}`)));
  });
  const slider = html("input", { type: "range", id: "lam", min: 0, max: 1, step: 0.05, value: mixing.lam, "aria-labelledby": "lam-value" });
  slider.addEventListener("input", () => { mixing.lam = Number(slider.value); showLam(); });
  box.replaceChildren(
    html("fieldset", { class: "pairs" }, html("legend", {}, "Pair of test images"), ...choices),
    html("div", { class: "mixer" },
      html("div", { class: "stay" },
        html("canvas", { id: "mixed", width: 320, height: 320, role: "img", "aria-label": "The mixed image" }),
        html("p", { class: "lam", id: "lam-value" }), slider,
        html("div", { class: "ends" }, html("span", { id: "end-second" }), html("span", { id: "end-first" }))),
      html("div", {}, html("p", { class: "note key", id: "along-key" }), html("div", { id: "along", class: "multiples" }))),
    html("h3", {}, "The paper's two curves"),
    html("p", { class: "lead" }, `The same over ${between.images.toLocaleString("en")} ordered pairs, one test image per class, as in Fig. 4 of the paper: how large the scores of a mixture are, and how far the score of one class is above that of the other, each relative to the unmixed image. ${bandNote()}`),
    html("p", { class: "legend", "aria-hidden": "true" }, ...variants.map((variant, k) => html("span", {}, swatch(colours[k]), variant.name))),
    html("div", { class: "columns" }, html("div", { id: "norms", class: "chart" }), html("div", { id: "gaps", class: "chart" })));
  choosePair();
}

function choosePair() {
  const pair = data.between.pairs[mixing.pair];
  at("along-key").textContent = `Probability in percent after temperature scaling, along lam. Solid: ${pair.classes[0]}; dashed: ${pair.classes[1]}; pale: all other classes together.`;
  at("end-second").replaceChildren(...soft(`0: ${pair.classes[1]}`));
  at("end-first").replaceChildren(...soft(`1: ${pair.classes[0]}`));
  const canvas = at("mixed");
  canvas.hidden = !pair.pictures[0];
  canvas.title = pair.files.filter(Boolean).join(" and ");
  mixing.images = null;
  if (pair.pictures[0]) {
    const chosen = mixing.pair;
    Promise.all(pair.pictures.map(loadImage)).then((images) => {
      if (chosen !== mixing.pair) return;
      mixing.images = images;
      canvas.classList.toggle("tiny", images[0].naturalWidth <= 40);
      [canvas.width, canvas.height] = [images[0].naturalWidth, images[0].naturalHeight];
      drawMixture();
    });
  }
  drawAlong();
}
const loadImage = (uri) => new Promise((resolve, reject) => {
  const image = new Image();
  image.onload = () => resolve(image);
  image.onerror = reject;
  image.src = uri;
});
// lam a + (1 - lam) b: a over b with opacity lam is the same sum of bytes that training computes.
function drawMixture() {
  if (!mixing.images) return;
  const canvas = at("mixed");
  const context = canvas.getContext("2d");
  const [first, second] = mixing.images;
  context.globalAlpha = 1;
  context.drawImage(second, 0, 0, canvas.width, canvas.height);
  context.globalAlpha = mixing.lam;
  context.drawImage(first, 0, 0, canvas.width, canvas.height);
}

function drawAlong() {
  const { lams, pairs } = data.between;
  const pair = pairs[mixing.pair];
  const box = at("along");
  box.replaceChildren();
  mixing.charts = [];
  mixing.captions = [];
  pair.along.forEach((along, k) => {
    if (!along) return;
    const sub = html("span", { class: "sub" });
    const chart = html("div", {});
    box.append(html("figure", {}, html("figcaption", {}, swatch(colours[k]), html("strong", {}, variants[k].name), sub), chart));
    const points = (values) => lams.map((lam, step) => [lam, values[step]]);
    mixing.captions.push({ along, sub });
    mixing.charts.push(lineChart(chart, {
      label: `Probabilities of ${pair.classes[0]} and ${pair.classes[1]} under ${variants[k].name} as lam goes from 0 to 1`,
      x: { domain: [0, 1], ticks: [0, 0.5, 1], format: String },
      y: { domain: [0, 1], wanted: 2, format: (value) => fixed(100 * value, 0) },
      series: [
        { name: "others", colour: "var(--other)", width: 1.5, points: points(along.first.map((value, step) => Math.max(0, 1 - value - along.second[step]))) },
        { name: pair.classes[1], colour: colours[k], dash: "4 3", points: points(along.second) },
        { name: pair.classes[0], colour: colours[k], points: points(along.first) },
      ],
      height: 128, cursor: mixing.lam,
    }));
  });
  showLam();
}
function showLam() {
  const { lams, pairs } = data.between;
  const pair = pairs[mixing.pair];
  const step = Math.round(mixing.lam * (lams.length - 1));
  at("lam-value").textContent = `lam = ${mixing.lam.toFixed(2)}`;
  at("lam").setAttribute("aria-valuetext", `lam ${mixing.lam.toFixed(2)}, ${Math.round(100 * mixing.lam)} percent ${pair.classes[0]}`);
  for (const chart of mixing.charts) chart.moveCursor(mixing.lam);
  for (const { along, sub } of mixing.captions)
    sub.replaceChildren(...soft(`${pair.classes[0]}: ${percent(100 * along.first[step])}, ${pair.classes[1]}: ${percent(100 * along.second[step])}, says ${along.top[step]}`));
  drawMixture();
}

// The spread of the best Infinite Class method and of the best other one; more bands would cover each other.
function bandVariants() {
  const first = (wanted) => variants.findIndex((variant, k) => data.between.curves[k] && variant.colour.startsWith("warm") === wanted);
  return [first(true), first(false)].filter((k) => k >= 0);
}
const bandNote = () => `Bands: one standard deviation over the pairs, for ${bandVariants().map((k) => variants[k].name).join(" and ")}.`;

function drawCurves() {
  const { curves, reason } = data.between;
  if (reason) return;
  const relative = (curve, column) => {
    const end = Math.abs(curve[curve.length - 1][column]) || 1;
    return curve.map((point) => [point[0], point[column] / end]);
  };
  const banded = bandVariants();
  const draw = (id, column, label, more) => {
    const series = variants.map((variant, k) => ({ name: variant.name, colour: colours[k], dash: dashOf(k), points: curves[k] ? relative(curves[k], column) : [], ...(more && curves[k] && banded.includes(k) ? { band: more(curves[k]) } : {}) }));
    const values = series.flatMap((one) => [...one.points.map(([, b]) => b), ...(one.band || []).flatMap(([, low, high]) => [low, high])]);
    lineChart(at(id), {
      label: `${label}, at lam 0.5: ${series.filter((one) => one.points.length).map((one) => `${one.name} ${fixed(one.points[(one.points.length - 1) / 2][1], 2)}`).join("; ")}`,
      x: { label: "lam", domain: [0, 1], ticks: [0, 0.25, 0.5, 0.75, 1], format: String, name: "lam" },
      y: { label, domain: column === 1 ? [0, Math.max(1, extent(values)[1])] : widened(extent(values), 0.02) },
      series, zero: column === 2, height: 280,
    });
  };
  draw("norms", 1, "squared norm of the scores");
  draw("gaps", 2, "score of the first class minus that of the second", (curve) => {
    const end = Math.abs(curve[curve.length - 1][2]) || 1;
    return curve.map(([lam, , middle, deviation]) => [lam, (middle - deviation) / end, (middle + deviation) / end]);
  });
}

function drawCharts() {
  drawForest();
  drawSizes();
  drawReliability();
  drawRisk();
  drawLearning();
  drawShifted();
  if (!data.between.reason) { drawAlong(); drawCurves(); }
}

function option(select, value, text, chosen) { select.append(html("option", { value, selected: chosen }, text)); }

function start() {
  document.querySelectorAll(".swatch[data-variant]").forEach((node) => node.style.setProperty("--c", colours[Number(node.dataset.variant)]));
  variants.forEach((variant, k) => {
    option(at("baseline"), k, variant.name, k === data.baseline);
    option(at("left"), k, variant.name, k === data.baseline);
    option(at("right"), k, variant.name, k === (data.baseline === 0 ? Math.min(1, variants.length - 1) : 0));
  });
  data.measures.forEach((measure) => option(at("measure"), measure.key, measure.label, false));
  at("baseline").addEventListener("change", drawForest);
  at("measure").addEventListener("change", drawForest);
  at("search").addEventListener("input", drawClassTable);
  for (const side of ["left", "right"]) {
    at(side).addEventListener("change", () => drawMistakes(side));
    drawMistakes(side);
  }
  at("mistakes-note").textContent = [
    data.predictions_reason,
    data.thumbnails_reason ? `No thumbnails: ${data.thumbnails_reason}.` : "",
    "Confusions are means over seeds; mistakes are those of the first seed, with the confidence after temperature scaling.",
  ].filter(Boolean).join(" ");
  drawClassTable();
  drawCost();
  buildBetween();
  drawCharts();
  let drawn = window.innerWidth;
  let waiting = 0;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { if (window.innerWidth !== drawn) { drawn = window.innerWidth; drawCharts(); } }, 120);
  });
  window.addEventListener("beforeprint", () => { paper.on = true; drawCharts(); });
  window.addEventListener("afterprint", () => { paper.on = false; drawCharts(); });
  if (data.reload) startReloading();
}

// A page of a comparison in progress loads itself again, unless the reader switches that off.
function startReloading() {
  const box = at("reload");
  const remember = (value) => { try { sessionStorage.setItem("icmixup-reload", value); } catch { /* private windows refuse */ } };
  try { box.checked = sessionStorage.getItem("icmixup-reload") !== "off"; } catch { /* as above */ }
  box.addEventListener("change", () => remember(box.checked ? "on" : "off"));
  setInterval(() => { if (box.checked) window.location.reload(); }, 1000 * data.reload);
}

start();
