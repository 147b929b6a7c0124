// What scrolls sideways can be reached and scrolled with the keyboard, and each block's buttons have a name.
const scrolling = ".md-typeset pre > code, .md-typeset__scrollwrap";
const mark = () => {
  for (const element of document.querySelectorAll(scrolling)) {
    if (element.scrollWidth > element.clientWidth) element.tabIndex = 0;
    else element.removeAttribute("tabindex");
  }
  document.querySelectorAll(".md-code__nav").forEach((nav, at) => {
    nav.setAttribute("aria-label", `Block of code ${at + 1}`);
  });
};
addEventListener("load", mark);
addEventListener("resize", mark);
setTimeout(mark, 300); // the theme wraps tables and adds buttons after the page has come
