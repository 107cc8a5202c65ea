// What is copied from a diff is the new version, with the button and by selecting: the signs "+", "-" and " " at the
// start of lines become generated content, and removed lines cannot be selected (site.css).
for (const code of document.querySelectorAll(".language-diff code")) {
  const lines = code.textContent.trimEnd().split("\n");
  code.dataset.copy = lines.filter((line) => !line.startsWith("-")).map((line) => line.slice(1)).join("\n");
  for (const line of code.querySelectorAll(":scope > span[id]")) {
    const first = document.createTreeWalker(line, NodeFilter.SHOW_TEXT).nextNode();
    if (first === null || !/^[-+ ]/.test(first.data)) continue;
    const sign = document.createElement("span");
    sign.dataset.sign = first.data[0];
    first.before(sign);
    first.data = first.data.slice(1);
    line.classList.toggle("removed", sign.dataset.sign === "-");
  }
}
