// Tooltips, and folded parts opened for printing. The charts themselves need no script.
(function () {
  "use strict";
  var tip = document.getElementById("tip");

  function show(lines, x, y) {
    tip.textContent = "";
    lines.forEach(function (line, i) {
      var row = document.createElement("div");
      row.textContent = line;
      if (i === 0 && lines.length > 1) row.style.opacity = 0.7;
      tip.appendChild(row);
    });
    tip.style.display = "block";
    var left = x + 14;
    if (left + tip.offsetWidth > window.innerWidth - 8) left = x - tip.offsetWidth - 14;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.max(4, Math.min(y + 14, window.innerHeight - tip.offsetHeight - 8)) + "px";
  }

  function hide() { tip.style.display = "none"; }

  document.querySelectorAll(".plot").forEach(function (plot) {
    var points = JSON.parse(plot.dataset.points);
    var cursor = document.createElement("div");
    cursor.className = "cursor";
    plot.appendChild(cursor);
    plot.addEventListener("pointermove", function (event) {
      var box = plot.getBoundingClientRect();
      var at = (event.clientX - box.left) / box.width;
      var best = points[0];
      points.forEach(function (p) { if (Math.abs(p[0] - at) < Math.abs(best[0] - at)) best = p; });
      cursor.style.left = best[0] * 100 + "%";
      cursor.style.display = "block";
      var lines = ["step " + best[1].toLocaleString("en-US")];
      best[2].forEach(function (v) { lines.push(v[0] + "  " + v[1]); });
      show(lines, event.clientX, event.clientY);
    });
    plot.addEventListener("pointerleave", function () { cursor.style.display = "none"; hide(); });
  });

  document.querySelectorAll("[data-tip]").forEach(function (mark) {
    mark.addEventListener("pointermove", function (event) { show([mark.dataset.tip], event.clientX, event.clientY); });
    mark.addEventListener("pointerleave", hide);
  });

  window.addEventListener("beforeprint", function () {
    document.querySelectorAll("details").forEach(function (d) { d.open = true; });
  });
})();
