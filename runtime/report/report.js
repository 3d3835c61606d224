// What a shape says in its <title>, at once and beside the pointer, also for those who touch.
const tip = document.getElementById("tip");
for (const title of document.querySelectorAll("svg title")) {
  title.parentNode.dataset.tip = title.textContent;
  title.remove();
}
function show(event) {
  const text = event.target.closest?.("[data-tip]")?.dataset.tip;
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const right = document.documentElement.clientWidth - tip.offsetWidth - 8;
  const above = event.clientY - tip.offsetHeight - 12;
  tip.style.left = `${Math.max(8, Math.min(event.clientX + 12, right))}px`;
  tip.style.top = `${above > 8 ? above : event.clientY + 16}px`;
}
addEventListener("pointermove", show);
addEventListener("pointerdown", show);
addEventListener("scroll", () => (tip.hidden = true), { passive: true });
