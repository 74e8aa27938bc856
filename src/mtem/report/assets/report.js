"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (name) => document.getElementById(name);
  const theme = () => {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue("--" + name).trim();
    const classes = [read("before"), read("after"), read("good"), read("alarm"), "#805ad5", "#718096"];
    const colors = { before: read("before"), after: read("after"), alarm: read("alarm"), text: read("soft"), band: read("band") };
    classes.forEach((color, number) => { colors["class" + number] = color; });
    return { colors, text: read("text"), soft: read("soft"), line: read("line"), sequence: classes };
  };

  // ------------------------------------------------------------------ charts

  const painted = (value, colors) => {
    if (typeof value === "string") return value.startsWith("@") ? colors[value.slice(1)] || colors.text : value;
    if (Array.isArray(value)) return typeof value[0] === "object" ? value.map((entry) => painted(entry, colors)) : value;
    if (value && typeof value === "object") {
      const copy = {};
      for (const key of Object.keys(value)) {
        const isText = key === "x" || key === "y" || key === "text" || key === "name";
        copy[key] = isText && Array.isArray(value[key]) ? value[key] : key === "name" ? value[key] : painted(value[key], colors);
      }
      return copy;
    }
    return value;
  };

  const drawCharts = () => {
    const look = theme();
    const axis = { gridcolor: look.line, linecolor: look.line, zerolinecolor: look.line, automargin: true };
    for (const figure of data.figures) {
      const layout = painted(figure.layout, look.colors);
      for (const name of Object.keys(layout)) if (/^[xy]axis/.test(name)) layout[name] = { ...axis, ...layout[name] };
      Plotly.react(byId(figure.id + "-plot"), painted(figure.data, look.colors), {
        margin: { l: 52, r: 16, t: 22, b: 44 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { color: look.text, size: 12 }, colorway: look.sequence, hovermode: "closest", bargap: 0.25,
        legend: { orientation: "h", y: -0.25, yanchor: "top", font: { color: look.soft } }, ...layout,
      }, { displayModeBar: false, responsive: true });
    }
  };
  drawCharts();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
  window.addEventListener("beforeprint", () => { document.documentElement.dataset.theme = "light"; drawCharts(); });
  window.addEventListener("afterprint", () => { delete document.documentElement.dataset.theme; drawCharts(); });

  // ------------------------------------------------------------------ the table of texts

  const HEIGHT = 34;
  const unpack = async (text) => {
    const binary = atob(text);
    const bytes = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  };

  const explore = (table) => {
    const count = table.text.length;
    const lower = table.text.map((text) => text.toLowerCase());
    const className = (number) => (number < 0 || number === undefined ? "" : table.classes[number]);
    const fixed = (value, digits) => (value === null || value === undefined ? "" : value.toFixed(digits));
    const columns = [
      { key: "index", title: "index", width: "74px", show: (i) => fixed(table.index[i], 2), number: true },
      { key: "source_prediction", title: "before", width: "minmax(80px, 130px)", show: (i) => className(table.source_prediction[i]), wide: true },
      { key: "prediction", title: "after", width: "minmax(80px, 130px)", show: (i) => className(table.prediction[i]) },
      { key: "confidence", title: "confidence", width: "100px", show: (i) => fixed(table.confidence[i], 2), number: true, wide: true },
      { key: "label", title: "label", width: "minmax(80px, 130px)", show: (i) => className(table.label[i]), wide: true },
      { key: "text", title: "text", width: "minmax(0, 1fr)", show: (i) => table.text[i].slice(0, 400) },
    ].filter((column) => table[column.key]);
    const head = byId("head"), body = byId("body"), rows = byId("rows"), spacer = byId("spacer");
    let order = Array.from({ length: count }, (_, i) => i);
    let sorted = { key: table.index ? "index" : "confidence", down: true };
    let current = -1;

    const isChanged = (i) => table.source_prediction && table.source_prediction[i] !== table.prediction[i];
    const isWrong = (i) => table.label && table.label[i] >= 0 && table.label[i] !== table.prediction[i];

    const layOut = () => {
      const narrow = window.matchMedia("(max-width: 640px)").matches;
      const shown = columns.filter((column) => !(narrow && column.wide));
      byId("explorer").style.setProperty("--columns", shown.map((column) => column.width).join(" "));
    };

    const cell = (i, column) => {
      const element = document.createElement("span");
      element.setAttribute("role", "cell");
      element.setAttribute("dir", "auto");
      element.className = (column.number ? "number" : "") + (column.wide ? " wide-only" : "");
      if (column.key === "prediction" && isWrong(i)) element.className += " wrong";
      else if (column.key === "prediction" && isChanged(i)) element.className += " changed";
      element.textContent = column.show(i);
      return element;
    };

    const draw = () => {
      const first = Math.max(0, Math.floor(body.scrollTop / HEIGHT) - 5);
      const last = Math.min(order.length, Math.ceil((body.scrollTop + body.clientHeight) / HEIGHT) + 5);
      const parts = document.createDocumentFragment();
      for (let place = first; place < last; place++) {
        const row = document.createElement("div");
        row.className = "row" + (place === current ? " current" : "");
        row.id = "row-" + place;
        row.setAttribute("role", "row");
        row.setAttribute("aria-rowindex", String(place + 2));
        for (const column of columns) row.append(cell(order[place], column));
        parts.append(row);
      }
      rows.style.transform = `translateY(${first * HEIGHT}px)`;
      rows.replaceChildren(parts);
      if (current >= 0) body.setAttribute("aria-activedescendant", "row-" + current);
    };

    const compare = (key) => {
      const values = table[key];
      if (key === "text") return (a, b) => (lower[a] < lower[b] ? -1 : lower[a] > lower[b] ? 1 : a - b);
      if (key === "prediction" || key === "source_prediction" || key === "label") {
        return (a, b) => className(values[a]).localeCompare(className(values[b])) || a - b;
      }
      return (a, b) => (values[a] ?? -Infinity) - (values[b] ?? -Infinity) || a - b;
    };

    const update = () => {
      const words = byId("filter-words").value.toLowerCase().split(/\s+/).filter(Boolean);
      const wanted = byId("filter-class").value;
      const bound = (name, otherwise) => (byId(name).value === "" ? otherwise : Number(byId(name).value));
      const low = bound("filter-low", -Infinity), high = bound("filter-high", Infinity);
      const changed = byId("filter-changed").checked, wrong = byId("filter-wrong").checked;
      order = [];
      for (let i = 0; i < count; i++) {
        if (wanted !== "" && table.prediction[i] !== Number(wanted)) continue;
        if (table.index && (table.index[i] < low || table.index[i] > high)) continue;
        if ((changed && !isChanged(i)) || (wrong && !isWrong(i))) continue;
        if (!words.every((word) => lower[i].includes(word))) continue;
        order.push(i);
      }
      order.sort(compare(sorted.key));
      if (sorted.down) order.reverse();
      current = -1;
      body.removeAttribute("aria-activedescendant");
      byId("detail").hidden = true;
      spacer.style.height = order.length * HEIGHT + "px";
      body.scrollTop = 0;
      document.querySelector(".table").setAttribute("aria-rowcount", String(order.length + 1));
      const all = data.texts.total > count ? ` (a sample of ${data.texts.total.toLocaleString("en")})` : "";
      byId("count").textContent = `${order.length.toLocaleString("en")} of ${count.toLocaleString("en")} ${data.unit}${all}`;
      draw();
    };

    const shaded = (text) => {
      const parts = document.createDocumentFragment();
      let done = 0;
      for (const match of text.matchAll(/[\p{L}][\p{L}\p{N}_'\u2019-]+/gu)) {
        const weight = Object.hasOwn(data.words, match[0].toLowerCase()) ? data.words[match[0].toLowerCase()] : 0;
        if (!weight) continue;
        parts.append(text.slice(done, match.index));
        const mark = document.createElement("mark");
        mark.textContent = match[0];
        mark.style.backgroundColor = `rgba(var(--mark), ${Math.min(0.55, 0.08 + weight / 40)})`;
        mark.title = `typical of the target (${weight} standard errors)`;
        parts.append(mark);
        done = match.index + match[0].length;
      }
      parts.append(text.slice(done));
      return parts;
    };

    const open = (place) => {
      current = place;
      const i = order[place];
      const facts = columns.filter((column) => column.key !== "text").map((column) => `${column.title} ${column.show(i)}`);
      if (table.source_confidence) facts.push(`confidence before ${fixed(table.source_confidence[i], 2)}`);
      byId("detail-title").textContent = table.row && table.row[i] !== null ? `Row ${table.row[i]} of the target file` : "Text";
      byId("detail-facts").textContent = facts.join(" · ");
      const box = byId("detail-text");
      box.replaceChildren();
      box.setAttribute("dir", "auto");
      if (table.tree && table.tree[i].length) {
        const depth = [];
        table.tree[i].forEach(([parent, text], number) => {
          depth[number] = parent < 0 || depth[parent] === undefined ? 0 : depth[parent] + 1;
          const post = document.createElement("p");
          post.className = "post";
          post.setAttribute("dir", "auto");
          post.style.marginLeft = Math.min(depth[number], 12) * 18 + "px";
          post.append(shaded(text));
          box.append(post);
        });
      } else {
        box.append(shaded(table.text[i]));
      }
      const cut = data.texts.cut !== null && table.text[i].length >= data.texts.cut;
      const note = Object.keys(data.words).length ? "Shaded words are more frequent in the target than in the source. " : "";
      byId("detail-note").textContent = note + (cut ? `Only the first ${data.texts.cut.toLocaleString("en")} characters are in this page.` : "");
      byId("detail").hidden = false;
      draw();
    };

    // A spreadsheet runs cells that begin like a formula: they get an apostrophe.
    const csvCell = (value) => {
      const text = value === null || value === undefined ? "" : String(value);
      const safe = typeof value === "string" && /^\s*[=+\-@\t\r|%]/.test(text) ? "'" + text : text;
      return /[",\r\n]/.test(safe) ? '"' + safe.replaceAll('"', '""') + '"' : safe;
    };
    const csv = () => {
      const fields = [["row", (i) => table.row[i]], ["index", (i) => table.index[i]],
        ["source_prediction", (i) => className(table.source_prediction[i])], ["source_confidence", (i) => table.source_confidence[i]],
        ["prediction", (i) => className(table.prediction[i])], ["confidence", (i) => table.confidence[i]],
        ["label", (i) => className(table.label[i])], ["text", (i) => table.text[i]]].filter(([name]) => table[name]);
      const lines = [fields.map(([name]) => name), ...order.map((i) => fields.map(([, read]) => read(i)))];
      return lines.map((line) => line.map(csvCell).join(",")).join("\r\n") + "\r\n";
    };

    for (const column of columns) {
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("role", "columnheader");
      button.className = column.wide ? "wide-only" : "";
      button.dataset.key = column.key;
      button.addEventListener("click", () => {
        sorted = { key: column.key, down: sorted.key === column.key ? !sorted.down : column.number === true };
        mark();
        update();
      });
      head.append(button);
    }
    const mark = () => {
      for (const button of head.children) {
        const column = columns.find((entry) => entry.key === button.dataset.key);
        const here = sorted.key === column.key;
        button.textContent = column.title + (here ? (sorted.down ? " ↓" : " ↑") : "");
        button.setAttribute("aria-sort", here ? (sorted.down ? "descending" : "ascending") : "none");
      }
    };
    table.classes.forEach((name, number) => {
      const option = document.createElement("option");
      option.value = String(number);
      option.textContent = name;
      byId("filter-class").append(option);
    });
    for (const [name, present] of [["with-index", table.index], ["with-before", table.source_prediction], ["with-label", table.label]]) {
      for (const element of document.querySelectorAll("." + name)) element.hidden = !present;
    }
    byId("explorer-title").textContent = `Target ${data.unit}`;
    byId("filters").addEventListener("submit", (event) => event.preventDefault());
    byId("filters").addEventListener("input", update);
    byId("export").addEventListener("click", () => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob(["\ufeff", csv()], { type: "text/csv;charset=utf-8" }));
      link.download = data.name.replace(/[^\w.-]+/g, "-") + "-texts.csv";
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
    // By position: a row that is drawn again between press and release of the mouse gets no click of its own.
    rows.addEventListener("click", (event) => {
      const place = Math.floor((event.clientY - spacer.getBoundingClientRect().top) / HEIGHT);
      if (place >= 0 && place < order.length) open(place);
    });
    body.addEventListener("scroll", () => requestAnimationFrame(draw), { passive: true });
    body.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -count, End: count }[event.key];
      if (event.key === "Enter" && current >= 0) open(current);
      if (step === undefined || !order.length) return;
      event.preventDefault();
      current = Math.max(0, Math.min(order.length - 1, current + step));
      const top = current * HEIGHT;
      if (top < body.scrollTop) body.scrollTop = top;
      if (top + HEIGHT > body.scrollTop + body.clientHeight) body.scrollTop = top + HEIGHT - body.clientHeight;
      draw();
    });
    window.addEventListener("resize", () => { layOut(); draw(); });
    layOut();
    mark();
    update();
    document.documentElement.dataset.ready = "true";
  };

  if (data.texts) {
    unpack(byId("texts").textContent).then(explore).catch((error) => {
      byId("count").textContent = "The texts cannot be shown in this browser: " + error.message;
    });
  } else {
    document.documentElement.dataset.ready = "true";
  }
})();
