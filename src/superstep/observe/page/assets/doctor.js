// Nothing moves on this page; it says when it is there.
document.documentElement.dataset.ready = "doctor";
