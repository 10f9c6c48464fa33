function openWhere() {}
function drawWhere() {}
