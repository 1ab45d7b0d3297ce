//! A channel that takes less than it is offered.

use super::*;

/// Offers another channel only a part of what it is offered, and checks the completions.
pub(super) struct StingyChannel {
    pub inner: AnyChannel,
    pub random: SmallRng,
    pub(super) seen: Arc<Mutex<Seen>>,
}

impl StingyChannel {
    fn watch(&self, finished: &[Completion<Buffer>]) {
        let aborted = |done: &&Completion<Buffer>| done.tag.queue() == MERGED && done.outcome == Outcome::Aborted;
        self.seen.lock().unwrap().joined_aborted += finished.iter().filter(aborted).count() as u64;
    }
}

impl DiskChannel<UringContext> for StingyChannel {
    fn submit(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        finished: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        let most = if self.random.random_ratio(1, 3) { self.random.random_range(0..=batch.len()) } else { batch.len() };
        let before = finished.len();
        let mut rest = batch.split_off(most);
        let merged = batch.iter().filter(|request| request.tag.queue() == MERGED).count() as u64;
        let taken = self.inner.submit(context, batch, finished);
        batch.append(&mut rest);
        {
            let mut seen = self.seen.lock().unwrap();
            seen.merged += merged;
            seen.refused += batch.len() as u64;
        }
        self.watch(&finished[before..]);
        taken
    }
    fn reap(&mut self, context: &mut UringContext, finished: &mut Vec<Completion<Buffer>>) -> usize {
        let before = finished.len();
        let count = self.inner.reap(context, finished);
        self.watch(&finished[before..]);
        count
    }
    fn cancel(&mut self, context: &mut UringContext, tags: &[Tag], finished: &mut Vec<Completion<Buffer>>) {
        assert!(tags.is_sorted() && !tags.is_empty());
        self.seen.lock().unwrap().cancels += tags.len() as u64;
        let before = finished.len();
        self.inner.cancel(context, tags, finished);
        self.watch(&finished[before..]);
    }
    fn outstanding(&self) -> u32 {
        self.inner.outstanding()
    }
    fn deadline(&self) -> Option<Instant> {
        self.inner.deadline()
    }
    fn close(&mut self, context: &mut UringContext) {
        assert_eq!(self.inner.outstanding(), 0, "a channel is drained before it is closed");
        self.inner.close(context);
    }
}
