/* Colours in figures are names from page.css, such as var(--text): what they are now, the browser says. */
const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
const config = {displaylogo: false, responsive: true, modeBarButtons: [["toImage", "zoom2d", "pan2d",
  "resetScale2d"]]};
const small = {size: 12, color: "var(--quiet)"}, ink = {color: "var(--text)"};
const axis = {gridcolor: "var(--grid)", zerolinecolor: "var(--grid)", linecolor: "var(--grid)", automargin: true,
  exponentformat: "none", separatethousands: true, title: {standoff: 8, font: small}};
const bars = {textposition: "inside", insidetextanchor: "middle", textangle: 0, constraintext: "inside"};
const heat = {colorbar: {thickness: 10, outlinewidth: 0, len: 1}};
const template = {data: {bar: [bars], heatmap: [heat]}, layout: {
  margin: {l: 62, r: 16, t: 34, b: 44},  /* above: where the library shows its tools */
  font: {...small, family: getComputedStyle(document.body).fontFamily},
  paper_bgcolor: "var(--box)", plot_bgcolor: "var(--box)",
  hoverlabel: {bgcolor: "var(--box)", align: "left", font: {...small, ...ink}},
  hovermode: "closest", dragmode: "zoom", xaxis: axis, yaxis: axis,
  legend: {orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: ink},
}};
const sample = document.body.appendChild(Object.assign(document.createElement("i"), {hidden: true}));
function colour(name) { sample.style.color = name; return getComputedStyle(sample).color; }
function draw(place, name) {
  const layout = {...figures[name].layout, template, uirevision: name};
  const told = JSON.stringify([figures[name].data, layout]).replace(/var\(--[a-z]+\)/g, colour);
  Plotly.react(place, ...JSON.parse(told), config);
  place.dataset.figure = name;
}
function drawAll() {
  for (const place of document.querySelectorAll("[data-figure]")) draw(place, place.dataset.figure);
}
function show(theme) { root.dataset.theme = theme; drawAll(); }  /* "": as the system is */
for (const choice of document.querySelectorAll("select[data-place]"))
  choice.addEventListener("change", () => draw(document.getElementById(choice.dataset.place), choice.value));
document.getElementById("theme").addEventListener("click", () =>
  show((root.dataset.theme || (dark.matches ? "dark" : "light")) === "dark" ? "light" : "dark"));
dark.addEventListener("change", drawAll);
let read = "";  /* the theme on the screen while a page is printed, which is always light */
addEventListener("beforeprint", () => { read = root.dataset.theme || ""; show("light"); });
addEventListener("afterprint", () => show(read));
drawAll();
