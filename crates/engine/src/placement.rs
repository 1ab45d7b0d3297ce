//! The workers of devices' queues.

/// Queues of a worker.
#[derive(Clone, Copy, Debug, Default)]
struct PlacedQueues {
    /// First queues of devices.
    first: u32,
    all: u32,
}

/// Places the queues of all devices on workers. A device's queues are on consecutive workers, and the devices' first
/// queues, the busiest if guests use few, are spread like all others. Otherwise every device with a queue for each
/// worker would begin at worker 0.
#[derive(Clone, Debug)]
pub struct QueuePlacement(Vec<PlacedQueues>);

impl QueuePlacement {
    /// Returns a placement without queues on this many workers, at least 1.
    pub fn new(workers: u16) -> QueuePlacement {
        QueuePlacement(vec![PlacedQueues::default(); usize::from(workers.max(1))])
    }

    /// Returns the number of workers.
    pub fn workers(&self) -> u16 {
        self.0.len() as u16
    }

    /// Changes the number of workers, at least 1. Queues on removed workers are forgotten.
    pub fn set_workers(&mut self, workers: u16) {
        self.0.resize(usize::from(workers.max(1)), PlacedQueues::default());
    }

    /// Returns the worker with the fewest queues.
    pub fn least_loaded(&self) -> u16 {
        (0..self.workers()).min_by_key(|worker| self.0[usize::from(*worker)].all).unwrap_or(0)
    }

    /// Returns the workers of a device's queues: consecutive ones from a worker with the fewest first queues, and among
    /// these from the one whose workers have the fewest queues.
    pub fn round_robin(&self, queues: u16) -> Vec<u16> {
        let workers = self.workers();
        let from = |start: u16| {
            (0..queues).map(move |queue| ((u32::from(start) + u32::from(queue)) % u32::from(workers)) as u16)
        };
        let load =
            |start: u16| from(start).take(usize::from(workers)).map(|at| self.0[usize::from(at)].all).sum::<u32>();
        let start = (0..workers).min_by_key(|start| (self.0[usize::from(*start)].first, load(*start))).unwrap_or(0);
        from(start).collect()
    }

    /// Counts a queue of a device, given by its number, that has moved from a worker to another.
    pub fn moved(&mut self, queue: u16, from: u16, to: u16) {
        self.take(queue, from);
        self.add(queue, to);
    }

    /// Counts a queue, given by its number. Ignores a worker that does not exist.
    fn add(&mut self, queue: u16, worker: u16) {
        if let Some(placed) = self.0.get_mut(usize::from(worker)) {
            placed.first += u32::from(queue == 0);
            placed.all += 1;
        }
    }

    /// Removes a queue.
    fn take(&mut self, queue: u16, worker: u16) {
        if let Some(placed) = self.0.get_mut(usize::from(worker)) {
            placed.first = placed.first.saturating_sub(u32::from(queue == 0));
            placed.all = placed.all.saturating_sub(1);
        }
    }

    /// Counts the queues of a device, given by their workers. Ignores workers that do not exist.
    pub fn place(&mut self, map: &[u16]) {
        (0..).zip(map).for_each(|(queue, worker)| self.add(queue, *worker));
    }

    /// Removes the queues of a device.
    pub fn remove(&mut self, map: &[u16]) {
        (0..).zip(map).for_each(|(queue, worker)| self.take(queue, *worker));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(workers: u16, devices: &[u16]) -> Vec<Vec<u16>> {
        let mut placement = QueuePlacement::new(workers);
        let each = devices.iter().map(|queues| {
            let map = placement.round_robin(*queues);
            placement.place(&map);
            map
        });
        each.collect()
    }

    #[test]
    fn devices_continue_round_robin() {
        assert_eq!(places(2, &[3, 2]), [vec![0, 1, 0], vec![1, 0]]);
        assert_eq!(places(1, &[3]), [[0, 0, 0]]);
        assert_eq!(places(4, &[1; 6]).concat(), [0, 1, 2, 3, 0, 1]);
    }

    #[test]
    fn first_queues_are_spread() {
        assert_eq!(places(2, &[2, 2, 2]), [[0, 1], [1, 0], [0, 1]]);
        assert_eq!(places(4, &[2; 4]), [[0, 1], [2, 3], [1, 2], [3, 0]]);
        let starts: Vec<u16> = places(4, &[4, 8, 4, 4, 4]).iter().map(|map| map[0]).collect();
        assert_eq!(starts, [0, 1, 2, 3, 0]);
    }

    #[test]
    fn queues_that_move_are_counted_where_they_are() {
        let mut placement = QueuePlacement::new(2);
        placement.place(&[0, 1]);
        placement.moved(1, 1, 0);
        assert_eq!((placement.least_loaded(), placement.round_robin(1)), (1, vec![1]));
        placement.moved(0, 0, 1);
        assert_eq!(placement.round_robin(1), [0], "the first queue is at worker 1");
        placement.remove(&[1, 0]);
        assert_eq!(placement.round_robin(2), [0, 1]);
    }

    #[test]
    fn queues_placed_by_hand_count() {
        let mut placement = QueuePlacement::new(3);
        placement.place(&[0, 0]);
        placement.place(&[1]);
        assert_eq!(placement.round_robin(2), [2, 0]);
        placement.remove(&[0, 0]);
        assert_eq!(placement.round_robin(2), [2, 0], "the fewest of all");
        placement.place(&[2, 0]);
        assert_eq!(placement.round_robin(1), [0]);
    }
}
