//! Channels with their own operations in the worker's ring while no request is outstanding: the channel reads its
//! signal, and the worker sleeps afterwards.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use mqblk_core::{
    ArmResult, ByteLen, ByteOffset, Completion, Disk, DiskChannel, DiskError, DiskSlot, FinishedRequest, Geometry,
    GuestQueue, Intake, Limits, Op, Outcome, PublishResult, PullEnd, Request,
};
use mqblk_uring::{ClientId, EventFd, UringContext};

use super::*;
use crate::mailbox::Mailbox;
use crate::options::PlugOptions;
use crate::poll::PollPolicy;
use crate::queue_options::QueueOptions;
use crate::request::Buffer;
use crate::trial::{GEOMETRY, LIMITS};

/// More turns than the worker needs to come to rest.
const TURNS: usize = 20;

/// A disk that takes requests only after a signal, like a connection that is being made.
#[derive(Clone)]
struct SignalledDisk {
    event: EventFd,
    ready: Arc<AtomicBool>,
    reaped: Arc<AtomicU64>,
}

struct SignalledChannel {
    disk: SignalledDisk,
    client: ClientId,
}

impl SignalledDisk {
    fn new() -> SignalledDisk {
        SignalledDisk { event: EventFd::new().unwrap(), ready: Arc::default(), reaped: Arc::default() }
    }
}

impl Disk<UringContext> for SignalledDisk {
    fn geometry(&self) -> Geometry {
        GEOMETRY
    }

    fn limits(&self) -> Limits {
        LIMITS
    }

    fn resize(&self, _: Option<ByteLen>) -> Result<ByteLen, DiskError> {
        Ok(GEOMETRY.size)
    }

    fn resolved(&self) -> Vec<(&'static str, String)> {
        vec![]
    }

    fn open_channel(&self, context: &mut UringContext) -> Result<Box<dyn DiskChannel<UringContext>>, DiskError> {
        let client = context.add_client();
        context.watch(client, 0, &self.event).expect("room");
        Ok(Box::new(SignalledChannel { disk: self.clone(), client }))
    }
}

impl DiskChannel<UringContext> for SignalledChannel {
    fn submit(
        &mut self,
        _: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        finished: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        if !self.disk.ready.load(Ordering::Relaxed) {
            return 0;
        }
        let taken = batch.len();
        let done = Outcome::Done(ByteLen::ZERO);
        finished.extend(batch.drain(..).map(|request| Completion {
            outcome: done,
            tag: request.tag,
            buffer: request.buffer,
        }));
        taken
    }

    fn reap(&mut self, context: &mut UringContext, _: &mut Vec<Completion<Buffer>>) -> usize {
        while context.next(self.client).is_some() {
            self.disk.reaped.fetch_add(1, Ordering::Relaxed);
            self.disk.ready.store(true, Ordering::Relaxed);
        }
        0
    }

    fn outstanding(&self) -> u32 {
        0
    }

    fn close(&mut self, context: &mut UringContext) {
        context.cancel(self.client, 0);
    }
}

/// A queue with one flush, which is taken at a kick.
struct OneFlush {
    pulled: bool,
    finished: Arc<AtomicU64>,
}

impl GuestQueue for OneFlush {
    type Token = ();
    type Position = ();
    type Context = UringContext;

    fn depth(&self) -> u16 {
        4
    }

    fn enter(&mut self, _: &mut UringContext) -> Result<(), String> {
        Ok(())
    }

    fn leave(&mut self, _: &mut UringContext) {}

    fn pull<I: Intake<(), Buffer>>(&mut self, _: &mut UringContext, into: &mut I) -> PullEnd {
        let is_first = !std::mem::replace(&mut self.pulled, true);
        if is_first {
            into.admit((), DiskSlot::FIRST, Op::Flush, ByteOffset(0), ByteLen::ZERO, None);
        }
        PullEnd::Empty { taken: usize::from(is_first) }
    }

    fn finish<I: Intake<(), Buffer>>(&mut self, _: &mut UringContext, _: FinishedRequest<(), Buffer>, _: &mut I) {
        self.finished.fetch_add(1, Ordering::Relaxed);
    }

    fn abandon(&mut self, _: &mut UringContext, _: (), _: Option<Buffer>) {}

    fn publish(&mut self) -> PublishResult {
        PublishResult::Suppressed
    }

    fn notify(&mut self) {}

    fn arm(&mut self) -> ArmResult {
        ArmResult::Sleepable
    }

    fn disarm(&mut self) {}

    fn position(&self) {}
}

/// A worker with one queue on each of `disks`, whose requests wait in the plugs. Counts the finished ones.
fn worker_with(disks: &[SignalledDisk]) -> (Worker, Mailbox<Worker>, Arc<AtomicU64>) {
    let (mailbox, receiver) = Mailbox::new(0).expect("a mailbox");
    let options = UringOptions { submissions: 8, in_flight: 16, files: 1, buffers: 1 };
    let mut worker = Worker::new(options, receiver).expect("the host has io_uring");
    let finished = Arc::new(AtomicU64::new(0));
    for disk in disks {
        let options = QueueOptions {
            disks: vec![QueueDisk {
                slot: DiskSlot::FIRST,
                disk: Arc::new(disk.clone()),
                plug: PlugOptions::default(),
                health: Arc::default(),
            }],
            kick: Some(EventFd::new().unwrap().into()),
            // Armed in the first idle turn.
            policy: PollPolicy::Static(Duration::from_nanos(1)).into(),
            paused: false,
            on_fault: Box::new(|fault| panic!("{fault:?}")),
        };
        let queue = OneFlush { pulled: false, finished: Arc::clone(&finished) };
        worker.attach_queue(options, |_| Ok(queue)).expect("attached");
    }
    (worker, mailbox, finished)
}

/// Turns until the worker would sleep. `None`: it does not.
fn come_to_rest(worker: &mut Worker) -> Option<usize> {
    (1..=TURNS).find(|_| !worker.turn() && worker.poll_or_arm() == IdleDecision::Sleep)
}

#[test]
fn a_signal_without_an_outstanding_request_is_read_and_the_worker_sleeps() {
    for count in [1, 3] {
        let disks: Vec<_> = (0..count).map(|_| SignalledDisk::new()).collect();
        let (mut worker, _mailbox, finished) = worker_with(&disks);
        assert!(come_to_rest(&mut worker).is_some(), "requests that no disk takes keep the worker awake");
        assert_eq!(finished.load(Ordering::Relaxed), 0);
        for (at, disk) in (1..).zip(&disks) {
            disk.event.signal();
            assert!(come_to_rest(&mut worker).is_some(), "the signal of disk {at} of {count} is never read");
            assert_eq!(disk.reaped.load(Ordering::Relaxed), 1);
            // The request that waited for the signal is submitted before the worker sleeps.
            assert_eq!(finished.load(Ordering::Relaxed), at);
        }
        // Nothing waits and nothing is outstanding: no channel is busy.
        for disk in &disks {
            disk.event.signal();
            assert!(come_to_rest(&mut worker).is_some(), "a later signal is never read");
            assert_eq!(disk.reaped.load(Ordering::Relaxed), 2);
        }
    }
}
