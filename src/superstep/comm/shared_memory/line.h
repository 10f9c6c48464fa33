// The line: which operations move, who moves them, and what becomes of those whose ranks do not come.

#pragma once

#include <fcntl.h>

#include "messages.h"
#include "steps.h"

namespace superstep {

inline bool is_collective(const Operation& op) { return op.kind < ALL_TO_ALL; }
inline bool is_message(const Operation& op) { return op.kind > ALL_TO_ALL; }

inline int advance(Lane& lane, Operation& op) {
    if (!op.has_begun) {
        op.has_begun = true;
        op.since = Clock::now();
        if (is_collective(op))
            op.steps = steps_of(lane, op);
        else if (op.kind == ALL_TO_ALL)
            std::memcpy(op.out + op.coming_at[lane.me], op.in + op.going_at[lane.me], op.going[lane.me]);
    }
    return is_collective(op) ? advance_steps(lane, op) : advance_messages(lane, op);
}

inline bool is_dead(const Lane& lane, int64_t rank) {
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = lane.locks[rank];
    lock.l_len = 1;
    return fcntl(lane.file, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

// Those without whom an operation cannot go on now. Of others it may have all that they will ever say.
inline std::vector<int64_t> missing(const Lane& lane, const Operation& op) {
    std::vector<int64_t> found;
    for (int64_t q = 0; q < lane.size && op.has_begun; ++q) {
        if (q == lane.me) continue;
        const bool is_missing = !is_collective(op)    ? op.sent[q] < op.going[q] || op.got[q] < op.coming[q]
                                : op.read < op.posted ? !lane.has_posted(q, lane.step + uint32_t(op.read))
                                                      : !lane.has_room(q, lane.step + uint32_t(op.posted));
        if (is_missing) found.push_back(q);
    }
    return found;
}

// What may be under way at once: the first in line; and where that is a message, those behind it, to and from others,
// so that two ranks may send to each other before either receives.
inline std::vector<std::shared_ptr<Operation>> movable(const Lane& lane) {
    std::vector<std::shared_ptr<Operation>> found;
    for (const auto& op : lane.line) {
        if (!found.empty() && !is_message(*op)) break;
        const bool is_behind_another = std::any_of(found.begin(), found.end(), [&](const auto& other) {
            return other->kind == op->kind && other->peer == op->peer;
        });
        if (!is_behind_another) found.push_back(op);
        if (!is_message(*op)) break;
    }
    return found;
}

// With the mutex held: nothing that is in line will ever be done.
inline void fail(Lane& lane, int status, int64_t culprit) {
    lane.failed = status;
    lane.culprit = culprit;
    for (auto& op : lane.line) {
        op->culprit = culprit;
        op->status.store(status);
    }
    lane.line.clear();
}

// With the mutex held and given away meanwhile: moves what can be moved. Whether something came to its end.
inline bool pass(Lane& lane, std::unique_lock<std::mutex>& lock) {
    const auto ops = movable(lane);
    lock.unlock();
    std::vector<int> found;
    for (const auto& op : ops) found.push_back(advance(lane, *op));
    lock.lock();
    bool has_ended = false;
    for (size_t i = 0; i < ops.size(); ++i) {
        if (found[i] == UNDER_WAY) continue;
        has_ended = true;
        if (found[i] != DONE) {
            fail(lane, found[i], ops[i]->culprit);
            break;
        }
        ops[i]->status.store(DONE);
        lane.line.erase(std::find(lane.line.begin(), lane.line.end(), ops[i]));
    }
    if (lane.line.empty()) lane.wants_thread = false;
    if (has_ended) lane.changed.notify_all();
    return has_ended;
}

// With the mutex held: whether one of some ranks is missing for good, after which nothing in line will be done.
inline bool is_cut_off(Lane& lane, const std::vector<char>& is_gone, int status) {
    for (const auto& op : movable(lane))
        for (const int64_t rank : missing(lane, *op))
            if (is_gone[rank]) {
                fail(lane, status, rank);
                return true;
            }
    return false;
}

// With the mutex held and given away meanwhile: looks after those that are missing, and at the time.
inline void look(Lane& lane, std::unique_lock<std::mutex>& lock) {
    lane.next_look = Clock::now() + LOOK_EVERY;
    std::vector<char> is_gone(lane.size), is_asked(lane.size);
    for (const auto& op : movable(lane))
        for (const int64_t rank : missing(lane, *op)) is_asked[rank] = true;
    lock.unlock();
    for (int64_t rank = 0; rank < lane.size; ++rank) is_gone[rank] = is_asked[rank] && is_dead(lane, rank);
    lock.lock();
    // Who has gone did so after its last word: that is looked for once more.
    if (pass(lane, lock) || is_cut_off(lane, is_gone, DEAD)) return;
    for (const auto& op : movable(lane)) {
        const auto ranks = missing(lane, *op);
        const std::chrono::duration<double> waited = Clock::now() - op->since;
        if (!ranks.empty() && waited.count() > lane.timeout_s) return fail(lane, LATE, ranks.front());
    }
}

// With the mutex held and given away meanwhile: sleeps until another rank has moved, or it is time to look after them.
inline void sleep(Lane& lane, std::unique_lock<std::mutex>& lock) {
    Seat& seat = lane.seats[lane.me];
    const uint32_t seen = seat.bell.load();
    seat.asleep.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    std::vector<char> has_left(lane.size);
    for (int64_t q = 0; q < lane.size; ++q) has_left[q] = lane.seats[q].left.load() != 0;
    if (!pass(lane, lock) && !lane.is_closing.load() && !is_cut_off(lane, has_left, LEFT)) {
        const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(lane.next_look - Clock::now());
        if (left.count() > 0) {
            lock.unlock();
            const timespec patience{0, left.count()};
            syscall(SYS_futex, &seat.bell, FUTEX_WAIT, seen, &patience, nullptr, 0);
            lock.lock();
        }
        // Not told by how the sleep ended: signals and bells may end each before its time.
        if (Clock::now() >= lane.next_look) look(lane, lock);
    }
    seat.asleep.store(0, std::memory_order_relaxed);
}

// With the mutex held and given away meanwhile: moves what is in line until ``op`` has come to its end, or everything
// has. Only one thread of a process is in here for a lane.
inline void drive(Lane& lane, std::unique_lock<std::mutex>& lock, const Operation* op) {
    lane.is_driven = true;
    lane.next_look = Clock::now() + LOOK_EVERY;
    const auto is_over = [&] {
        return lane.line.empty() || lane.is_closing.load() || (op != nullptr && op->status.load() != UNDER_WAY);
    };
    while (!is_over()) {
        if (pass(lane, lock)) continue;
        const auto spun = Clock::now() + std::chrono::nanoseconds(lane.spin_ns);
        bool has_moved = false;
        while (!has_moved && lane.spin_ns > 0 && Clock::now() < spun) has_moved = pass(lane, lock);
        if (!has_moved && !is_over()) sleep(lane, lock);
    }
    lane.is_driven = false;
    lane.changed.notify_all();
}

inline void serve(Lane& lane) {
    std::unique_lock lock(lane.mutex);
    for (;;) {
        lane.changed.wait(lock, [&] {
            return lane.is_closing.load() || (lane.wants_thread && !lane.is_driven && !lane.line.empty());
        });
        if (lane.is_closing.load()) return;
        drive(lane, lock, nullptr);
    }
}

// All that this rank has to say is said: no other waits for what is left of it.
inline bool is_heard(const Operation& op) {
    return is_collective(op) ? op.steps == 1 && op.posted == 1
                             : op.kind == RECEIVE && op.coming[op.peer] <= ROOM;
}

}  // namespace superstep
