// Messages and all-to-alls, by letter boxes: a message goes in chunks of a slot, and who reads one makes room.

#pragma once

#include <cstring>
#include <new>

#include "lane.h"

namespace superstep {

inline int advance_messages(Lane& lane, Operation& op) {
    bool is_done = true;
    for (bool has_moved = true; has_moved;) {
        has_moved = false;
        is_done = true;
        for (int64_t ahead = 0; ahead < lane.size; ++ahead) {
            const int64_t q = (lane.me + ahead) % lane.size;
            if (q == lane.me) continue;
            Count &posted = lane.box_posted[lane.pair(lane.me, q)], &taken = lane.box_taken[lane.pair(lane.me, q)];
            while (op.sent[q] < op.going[q]) {
                const uint32_t number = posted.value.load(std::memory_order_relaxed);
                if (number - taken.value.load(std::memory_order_acquire) >= SLOTS) break;
                char* slot = lane.box(lane.me, q, number);
                const int64_t bytes = std::min(ROOM, op.going[q] - op.sent[q]);
                new (slot) Label{op.kind == ALL_TO_ALL ? ALL_TO_ALL : SEND, op.going[q], op.sent[q]};
                std::memcpy(slot + HEAD, op.in + op.going_at[q] + op.sent[q], bytes);
                posted.value.store(number + 1, std::memory_order_release);
                lane.ring(q);
                op.sent[q] += bytes;
                has_moved = true;
            }
            is_done = is_done && op.sent[q] == op.going[q];
        }
        for (int64_t ahead = 0; ahead < lane.size; ++ahead) {
            const int64_t q = (lane.me + lane.size - ahead) % lane.size;
            if (q == lane.me) continue;
            Count &posted = lane.box_posted[lane.pair(q, lane.me)], &taken = lane.box_taken[lane.pair(q, lane.me)];
            while (op.got[q] < op.coming[q]) {
                const uint32_t number = taken.value.load(std::memory_order_relaxed);
                if (number == posted.value.load(std::memory_order_acquire)) break;
                const char* slot = lane.box(q, lane.me, number);
                const Label wanted{op.kind == ALL_TO_ALL ? ALL_TO_ALL : SEND, op.coming[q], op.got[q]};
                if (std::memcmp(slot, &wanted, sizeof wanted) != 0) {
                    op.culprit = q;
                    return CROSSED;
                }
                const int64_t bytes = std::min(ROOM, op.coming[q] - op.got[q]);
                std::memcpy(op.out + op.coming_at[q] + op.got[q], slot + HEAD, bytes);
                taken.value.store(number + 1, std::memory_order_release);
                lane.ring(q);
                op.got[q] += bytes;
                has_moved = true;
            }
            is_done = is_done && op.got[q] == op.coming[q];
        }
    }
    return is_done ? DONE : UNDER_WAY;
}

}  // namespace superstep
