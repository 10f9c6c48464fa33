// What a pipeline rank holds of every unit at a moment of the step, told by its instructions up to then.
function share(t, start, took) { return took > 0 ? Math.max(0, Math.min(1, (t - start) / took)) : t >= start ? 1 : 0; }

function stateAt(step, rank, t) {
  const set = step.measured ? "measured" : "predicted", times = step[set].ranks[rank], columns = step.ranks[rank];
  const isFetched = columns.kind.includes(KIND.fetch), isReduced = columns.kind.includes(KIND.reduce);
  const units = new Map(step.held[rank].map((u) => [u, {
    // Shares: of the parameters that other ranks hold, how much is here; of the gradient, how much is summed.
    gathered: isFetched && step.zero ? 0 : 1, isFetching: false,
    buffer: step.zero < 2 || !isReduced, isLocal: false, reducing: -1, isSummed: false, isFrozen: step.frozen.includes(u),
    kept: [],
  }]));
  const found = { units, busy: -1, progress: 0, sends: [], updating: -1, isUpdated: false };
  for (let i = 0; i < times.start.length; i++) {
    if (columns.lane[i] === 0 ? times.start[i] > t : times.issued[i] > t) {
      if (columns.lane[i] === 0) break;
      continue;
    }
    apply(step, found, columns, i, t, times);
  }
  return found;
}

function apply(step, found, columns, i, t, times) {
  const name = KINDS[columns.kind[i]].name, u = columns.unit[i], own = found.units.get(u), done = share(t, times.start[i], times.took[i]);
  if (columns.lane[i] === 0 && done < 1 && t >= times.start[i]) found.busy = i, found.progress = done;
  switch (name) {
    case "fetch":
      own.gathered = Math.max(own.gathered, done); own.isFetching = done > 0 && done < 1;
      break;
    case "free":
      if (step.zero === 3) own.gathered = 0;
      break;
    case "forward":
      if (own) own.kept.push(columns.microbatch[i]);
      break;
    case "backward": case "backward-weight":
      if (own && done >= 1) own.kept = own.kept.filter((m) => m !== columns.microbatch[i]);
      for (const read of step.params[u]) {
        const one = found.units.get(read);
        if (one && !one.isFrozen) one.isLocal = true, one.buffer = true;
      }
      break;
    case "reduce":
      own.reducing = done < 1 ? done : -1;
      if (done >= 1) own.isSummed = true;
      break;
    case "settle":
      own.isSummed = true; own.isLocal = false;
      if (step.zero >= 2) own.buffer = false;
      break;
    case "send":
      if (done > 0 && done < 1) found.sends.push({ i, done });
      break;
    case "step":
      found.updating = done < 1 ? done : -1;
      if (done >= 1) {
        found.isUpdated = true;
        if (step.zero) for (const one of found.units.values()) one.gathered = 0;
      }
      break;
  }
}

// The places of a stage: its ranks that run the same list. tp counts fastest, as in the mesh.
function placesOf(step) {
  const { dp, cp, tp, ep, replicas } = step.mesh, shards = (dp * cp) / replicas, found = [];
  for (let d = 0; d < dp; d++) for (let c = 0; c < cp; c++) for (let p = 0; p < tp; p++) {
    const place = (d * cp + c) * tp + p, sharer = d * cp + c;
    found.push({ place, d, c, p, shard: sharer % shards, replica: Math.floor(sharer / shards), ep: Math.floor(place / ep), expert: place % ep });
  }
  return { places: found, shards };
}
