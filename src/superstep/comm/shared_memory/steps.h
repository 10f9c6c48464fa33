// Collectives: in each step every rank posts a slot on its board and reads those of the others.

#pragma once

#include <cstring>
#include <new>

#include "lane.h"

namespace superstep {

// A sum of more than ONE_STEP goes block by block: each rank sums its part of a block, and hands it to all. The next
// block is posted before the sums of this one.
struct Block {
    bool is_sum;
    int64_t first, count, part;
};

inline bool is_in_blocks(const Operation& op) { return op.kind == ALL_REDUCE && op.count * width(op.type) > ONE_STEP; }

inline int64_t block_elements(const Operation& op) { return ROOM / width(op.type) / 16 * 16; }

inline int64_t blocks_of(const Operation& op) { return (op.count + block_elements(op) - 1) / block_elements(op); }

inline Block block_of(const Lane& lane, const Operation& op, int64_t t) {
    const int64_t all = block_elements(op), blocks = blocks_of(op);
    const bool is_sum = t == 2 * blocks - 1 || (t > 0 && t % 2 == 0);
    const int64_t number = t == 0 ? 0 : is_sum ? (t == 2 * blocks - 1 ? blocks - 1 : t / 2 - 1) : (t + 1) / 2;
    const int64_t count = std::min(all, op.count - number * all);
    return {is_sum, number * all, count, (count + lane.size - 1) / lane.size};
}

// Of a part that stands at [first, first + part) of its block, what is there.
inline int64_t held(const Block& b, int64_t rank) {
    return std::clamp<int64_t>(b.count - rank * b.part, 0, b.part);
}

inline int64_t chunk_elements(const Lane& lane, const Operation& op) {
    const int64_t parts = op.kind == REDUCE_SCATTER ? lane.size : 1;
    return std::max<int64_t>(1, ROOM / width(op.type) / parts);
}

inline int64_t steps_of(const Lane& lane, const Operation& op) {
    if (is_in_blocks(op)) return 2 * blocks_of(op);
    const int64_t chunk = chunk_elements(lane, op);
    return std::max<int64_t>(1, (op.count + chunk - 1) / chunk);
}

inline Label label_of(const Operation& op) {
    const int64_t detail = op.kind == BROADCAST ? op.peer : int64_t(op.type) * 16 + int64_t(op.rule);
    return {op.kind, detail, op.count * width(op.type)};
}

inline void write(const Lane& lane, const Operation& op, int64_t t, char* slot) {
    const int64_t w = width(op.type);
    new (slot) Label(label_of(op));
    char* room = slot + HEAD;
    if (is_in_blocks(op)) {
        const Block b = block_of(lane, op, t);
        if (b.is_sum) {
            std::memcpy(room, op.out + (b.first + lane.me * b.part) * w, held(b, lane.me) * w);
            return;
        }
        for (int64_t q = 0; q < lane.size; ++q)
            if (q != lane.me) std::memcpy(room + q * b.part * w, op.in + (b.first + q * b.part) * w, held(b, q) * w);
    } else {
        const int64_t chunk = chunk_elements(lane, op), first = t * chunk;
        const int64_t here = std::min(chunk, op.count - first);
        if (op.kind == REDUCE_SCATTER) {
            for (int64_t q = 0; q < lane.size; ++q)
                if (q != lane.me) std::memcpy(room + q * chunk * w, op.in + (q * op.count + first) * w, here * w);
        } else if (op.kind != BROADCAST || op.peer == lane.me) {
            std::memcpy(room, op.in + first * w, here * w);
        }
    }
}

// out = the sum over ranks of what stands in their slots; what is this rank's own never left it.
inline void sum(const Lane& lane, const Operation& op, uint32_t number, int64_t at, const char* own, char* out,
                int64_t count) {
    std::vector<const char*> from(lane.size);
    for (int64_t q = 0; q < lane.size; ++q) from[q] = q == lane.me ? own : lane.slot(q, number) + HEAD + at;
    combine(op.type, op.rule, from.data(), lane.size, out, count);
}

inline void take(const Lane& lane, const Operation& op, int64_t t, uint32_t number) {
    const int64_t w = width(op.type);
    if (is_in_blocks(op)) {
        const Block b = block_of(lane, op, t);
        if (!b.is_sum) {
            const int64_t at = (b.first + lane.me * b.part) * w;
            sum(lane, op, number, lane.me * b.part * w, op.in + at, op.out + at, held(b, lane.me));
            return;
        }
        for (int64_t q = 0; q < lane.size; ++q)
            if (q != lane.me)
                std::memcpy(op.out + (b.first + q * b.part) * w, lane.slot(q, number) + HEAD, held(b, q) * w);
    } else {
        const int64_t chunk = chunk_elements(lane, op), first = t * chunk;
        const int64_t here = std::min(chunk, op.count - first);
        if (op.kind == ALL_REDUCE) {
            sum(lane, op, number, 0, op.in, op.out, here);
        } else if (op.kind == REDUCE_SCATTER) {
            const char* own = op.in + (lane.me * op.count + first) * w;
            sum(lane, op, number, lane.me * chunk * w, own, op.out + first * w, here);
        } else if (op.kind == ALL_GATHER) {
            for (int64_t q = 0; q < lane.size; ++q) {
                char* to = op.out + (q * op.count + first) * w;
                const char* from = q == lane.me ? op.in + first * w : lane.slot(q, number) + HEAD;
                if (to != from) std::memcpy(to, from, here * w);
            }
        } else if (op.peer != lane.me) {
            std::memcpy(op.out + first * w, lane.slot(op.peer, number) + HEAD, here * w);
        }
    }
}

inline bool has_label(const Operation& op, const char* slot) {
    const Label wanted = label_of(op);
    return std::memcmp(slot, &wanted, sizeof wanted) == 0;
}

// Goes as far as the others let it: DONE, UNDER_WAY, or CROSSED.
inline int advance_steps(Lane& lane, Operation& op) {
    for (bool has_moved = true; has_moved;) {
        has_moved = false;
        while (op.posted < op.steps) {
            const int64_t t = op.posted;
            if (is_in_blocks(op)) {
                // A sum is handed on once it is made: two steps after its block was posted, but for the ends.
                const Block b = block_of(lane, op, t);
                const int64_t made = b.first == 0 ? 0 : 2 * (b.first / block_elements(op)) - 1;
                if (b.is_sum && op.read <= made) break;
            }
            const uint32_t number = lane.step + uint32_t(t);
            bool is_free = true;
            for (int64_t q = 0; q < lane.size && is_free; ++q) is_free = q == lane.me || lane.has_room(q, number);
            if (!is_free) break;
            write(lane, op, t, lane.slot(lane.me, number));
            lane.posted[lane.me].value.store(number + 1, std::memory_order_release);
            lane.ring_all();
            ++op.posted;
            has_moved = true;
        }
        while (op.read < op.posted) {
            const uint32_t number = lane.step + uint32_t(op.read);
            bool is_there = true;
            for (int64_t q = 0; q < lane.size && is_there; ++q) {
                if (q == lane.me) continue;
                is_there = lane.has_posted(q, number);
                if (is_there && !has_label(op, lane.slot(q, number))) {
                    op.culprit = q;
                    return CROSSED;
                }
            }
            if (!is_there) break;
            take(lane, op, op.read, number);
            lane.read[lane.me].value.store(number + 1, std::memory_order_release);
            lane.ring_all();
            ++op.read;
            has_moved = true;
        }
    }
    if (op.read < op.steps) return UNDER_WAY;
    lane.step += uint32_t(op.steps);
    return DONE;
}

}  // namespace superstep
