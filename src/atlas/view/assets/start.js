// The page of a file: its spans are in the page itself.

const texts = HEAD.schedules.map((_, k) => {
  const element = document.getElementById("spans-" + k), text = element.textContent;
  element.remove();  // the base64 text would otherwise stay in memory
  return text;
});
openRun(texts).catch(error => {
  $("caption").textContent = "This page could not be drawn: " + error + ". It needs a browser of 2023 or later (DecompressionStream).";
  throw error;
});
