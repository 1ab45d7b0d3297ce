//! Counters of queues: plain numbers. The queue's worker writes them, others read a copy. With the feature `serde` they
//! are the answer of `stat`, under the same names except where a field says so.

/// Defines a structure of counters, with the sum of two.
macro_rules! counters {
    ($(#[$about:meta])* pub struct $name:ident { $($(#[$field_about:meta])* pub $field:ident: u64,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
        pub struct $name { $($(#[$field_about])* pub $field: u64,)* }

        impl $name {
            /// Adds the counters of another queue, or of an earlier attachment of the same one.
            pub fn add(&mut self, other: &$name) {
                $(self.$field = self.$field.saturating_add(other.$field);)*
            }
        }
    };
}

counters! {
    /// Counters of a queue since it was attached. They only grow. A field without a unit in its name is a number.
    pub struct QueueCounters {
        /// Requests completed in all.
        pub requests: u64,
        /// Reads finished.
        pub reads: u64,
        /// Writes finished.
        pub writes: u64,
        /// Flushes finished.
        pub flushes: u64,
        /// Discards finished (guest requests, not ranges).
        pub discards: u64,
        /// Write-zeroes finished (guest requests, not ranges).
        pub write_zeroes: u64,
        /// Requests that the queue completed itself, without the disk.
        pub answered_alone: u64,
        /// Of those, malformed ones.
        pub malformed: u64,
        /// Requests that did not succeed.
        pub errors: u64,
        /// Of those, reads.
        pub read_errors: u64,
        /// Of those, writes.
        pub write_errors: u64,
        /// Bytes read.
        pub read_bytes: u64,
        /// Bytes written.
        pub written_bytes: u64,
        /// Bytes of discards and write-zeroes, whether they succeeded or not.
        pub other_bytes: u64,
        /// Reads that were merged into the read before them on the disk (iostat's rrqm).
        pub read_merges: u64,
        /// Writes that were merged into the write before them on the disk (iostat's wrqm).
        pub write_merges: u64,
        /// Ranges of discards and write-zeroes that were merged into the one before them on the disk.
        pub other_merges: u64,
        /// Kicks from the guest.
        pub kicks: u64,
        /// Calls sent to the guest.
        pub calls: u64,
        /// Publishes for which the guest had asked not to be called.
        pub calls_suppressed: u64,
        /// Calls that were deferred, so that one covers more completions.
        pub calls_put_off: u64,
        /// Turns that found requests.
        pub turns: u64,
        /// Turns that found none.
        pub empty_turns: u64,
        /// Times the queue was armed.
        pub arms: u64,
        /// Time spent polling without finding anything, in nanoseconds.
        pub poll_ns: u64,
        /// Time in which requests were in flight, in nanoseconds.
        pub busy_ns: u64,
    }
}

counters! {
    /// Counters of a Xen ring's grants and events. All only grow, except [`mapped_pages`](Self::mapped_pages),
    /// [`stuck_pages`](Self::stuck_pages) and [`buffer_pages`](Self::buffer_pages).
    pub struct GrantCounters {
        /// Pages copied by the hypervisor, in either direction.
        pub copies: u64,
        /// Grant copy calls.
        pub copy_calls: u64,
        /// Pages whose copy failed.
        pub copy_errors: u64,
        /// Pages mapped.
        pub maps: u64,
        /// Map calls.
        pub map_calls: u64,
        /// Failed map calls; their pages were copied instead.
        pub map_errors: u64,
        /// Pages unmapped.
        pub unmaps: u64,
        /// Unmap calls.
        pub unmap_calls: u64,
        /// Pages of requests that were mapped before the request.
        pub persistent_hits: u64,
        /// Pages of requests that were not mapped before the request.
        pub persistent_misses: u64,
        /// Persistent grants unmapped because they were idle or to make space for others.
        pub persistent_purged: u64,
        /// Times that pages were copied because the ring had reached its limit of persistent grants.
        pub over_cap: u64,
        /// Times that pages were copied because the host's budget was exhausted.
        pub over_budget: u64,
        /// Pages mapped now. Where rings share a pool: by all of them.
        #[cfg_attr(feature = "serde", serde(rename = "held"))]
        pub mapped_pages: u64,
        /// Pages whose unmap failed. They stay mapped and are not used again.
        #[cfg_attr(feature = "serde", serde(rename = "stuck"))]
        pub stuck_pages: u64,
        /// Buffer pages that hold memory now.
        pub buffer_pages: u64,
        /// Indirect requests.
        pub indirect_requests: u64,
        /// Barriers executed.
        pub barriers: u64,
        /// Events sent.
        pub events_sent: u64,
        /// Events received.
        #[cfg_attr(feature = "serde", serde(rename = "events_taken"))]
        pub events_received: u64,
    }
}

counters! {
    /// Counters of a disk's connections to its storage, since the disk was opened. All only grow, except
    /// [`connected`](Self::connected).
    pub struct ConnectionCounters {
        /// Connections now.
        pub connected: u64,
        /// Connections made.
        pub made: u64,
        /// Connections lost.
        pub lost: u64,
        /// Attempts to connect that failed.
        pub failed_attempts: u64,
        /// Requests that a lost connection left unfinished, and that the next one repeats.
        pub repeated: u64,
        /// Requests that the storage refused, with an error of its own.
        pub errors: u64,
        /// Bytes sent.
        pub sent_bytes: u64,
        /// Bytes received.
        pub received_bytes: u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_counter_is_added_to_itself() {
        let one = QueueCounters { reads: 1, other_bytes: u64::MAX, poll_ns: 3, ..QueueCounters::default() };
        let mut sum = QueueCounters { reads: 10, other_bytes: 1, calls: 5, ..QueueCounters::default() };
        sum.add(&one);
        assert_eq!(
            sum,
            QueueCounters { reads: 11, other_bytes: u64::MAX, poll_ns: 3, calls: 5, ..QueueCounters::default() }
        );
    }
}
