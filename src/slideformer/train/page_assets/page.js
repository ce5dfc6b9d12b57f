"use strict";
// Under the mouse a chart shows the logged values of the nearest step.
for (const chart of document.querySelectorAll("svg.chart")) {
  const [x0, x1, , , left, right, top, bottom] = JSON.parse(chart.dataset.frame);
  const curves = [...chart.querySelectorAll(".curve")].map((path) => ({
    name: path.dataset.name,
    points: JSON.parse(path.dataset.points),
  }));
  const steps = [...new Set(curves.flatMap((curve) => curve.points.map((point) => point[0])))].sort((a, b) => a - b);
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("y1", top);
  cursor.setAttribute("y2", bottom);
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  chart.parentNode.append(tip);

  chart.addEventListener("mousemove", (event) => {
    const box = chart.getBoundingClientRect();
    const scale = box.width / chart.viewBox.baseVal.width;
    const wanted = x0 + (((event.clientX - box.left) / scale - left) / (right - left)) * (x1 - x0);
    const step = steps.reduce((best, s) => (Math.abs(s - wanted) < Math.abs(best - wanted) ? s : best));
    const lines = curves.flatMap((curve) =>
      curve.points
        .filter((point) => point[0] === step)
        .map((point) => `${curve.name} ${point[1] === null ? "not finite" : Number(point[1].toPrecision(6))}`),
    );
    tip.textContent = [`step ${step}`, ...lines].join("\n");
    tip.hidden = false;
    const x = left + ((step - x0) / (x1 - x0)) * (right - left);
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    chart.append(cursor);
    const place = chart.offsetLeft || box.left - chart.parentNode.getBoundingClientRect().left;
    const onTheRight = x * scale > box.width / 2;
    tip.style.left = `${place + x * scale + (onTheRight ? -12 - tip.offsetWidth : 12)}px`;
    tip.style.top = `${box.top - chart.parentNode.getBoundingClientRect().top + top * scale}px`;
  });
  chart.addEventListener("mouseleave", () => {
    tip.hidden = true;
    cursor.remove();
  });
}
