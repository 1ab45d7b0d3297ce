//! A worker's channel to an image: to its files if the location of the data is known, else to the disk's threads.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_core::{ByteLen, ByteOffset, Completion, DiskChannel, DiskError, Geometry, Op, Outcome, Request, Tag};
use mqblk_memory::Buffer;
use mqblk_uring::UringContext;

use super::Direct;
use super::gate::InsideCell;
use super::map::Place;
use crate::admission::{self, DiskSize};
use crate::file::FileChannel;
use crate::qcow2::image::Image;
use crate::zeroes;

/// Most requests in a channel.
const MAX_INFLIGHT: usize = 1024;
/// Time after which requests that an inner channel had no room for are offered again, if nothing else wakes the worker.
const RETRY: Duration = Duration::from_millis(1);

/// A request that went to a file.
#[derive(Clone, Copy, Debug)]
struct Sent {
    file: usize,
    tag: Tag,
    start: ByteOffset,
    len: ByteLen,
    op: Op,
}

/// Target of a request.
enum Way {
    File(usize, u64),
    Zeroes,
    Threads,
}

pub(in super::super) struct Qcow2Channel {
    image: Arc<Image>,
    direct: Arc<Direct>,
    /// With the size as of the last batch.
    geometry: Geometry,
    size: Arc<DiskSize>,
    cell: Arc<InsideCell>,
    threads: Box<dyn DiskChannel<UringContext>>,
    for_threads: Vec<Request<Buffer>>,
    /// Each file with its next requests.
    files: Vec<(FileChannel, Vec<Request<Buffer>>)>,
    /// Requests to files, by index, their tag there.
    sent: Vec<Option<Sent>>,
    free: Vec<u16>,
    /// Untranslated completions of a file; kept for its capacity.
    completed: Vec<Completion<Buffer>>,
    /// Time to offer requests again that no inner channel has taken.
    retry_at: Option<Instant>,
}

impl Qcow2Channel {
    pub(in super::super) fn new(
        image: Arc<Image>,
        direct: Arc<Direct>,
        (geometry, size): (Geometry, Arc<DiskSize>),
        threads: Box<dyn DiskChannel<UringContext>>,
        context: &mut UringContext,
    ) -> Result<Qcow2Channel, DiskError> {
        let mut files = Vec::with_capacity(direct.files.len());
        for (path, file) in &direct.files {
            let channel = file.open_channel(context);
            let os = |source| DiskError::Os { what: format!("memory for {}", path.display()), source };
            files.push((channel.map_err(os)?, Vec::with_capacity(MAX_INFLIGHT)));
        }
        Ok(Qcow2Channel {
            image,
            geometry,
            size,
            cell: direct.gate.cell(),
            direct,
            threads,
            for_threads: Vec::with_capacity(MAX_INFLIGHT),
            files,
            sent: vec![None; MAX_INFLIGHT],
            free: (0..MAX_INFLIGHT as u16).rev().collect(),
            completed: Vec::with_capacity(MAX_INFLIGHT),
            retry_at: None,
        })
    }

    fn inside(&self) -> u32 {
        (MAX_INFLIGHT - self.free.len()) as u32
    }

    /// Returns the target of a request, when the gate is open.
    #[inline]
    fn way(&self, request: &Request<Buffer>) -> Way {
        let Request { start, len, op, .. } = *request;
        let is_read = op == Op::Read;
        // A durable write also needs durable tables. The first write after an opening sets the dirty bit.
        let may_go = is_read || op == Op::Write { fua: false } && self.image.is_dirty();
        if !may_go || admission::check_request(&self.geometry, request).is_some() {
            return Way::Threads;
        }
        match self.direct.map.find(start.0, len.0) {
            Some(Place::Data { file, at, writable }) if is_read || writable => Way::File(file, at),
            Some(Place::Zero) if is_read => Way::Zeroes,
            _ => Way::Threads,
        }
    }

    fn route(
        &mut self,
        context: &UringContext,
        mut request: Request<Buffer>,
        completions: &mut Vec<Completion<Buffer>>,
    ) {
        match self.way(&request) {
            Way::File(file, at) if file < self.files.len() => {
                let Some(index) = self.free.pop() else { return self.for_threads.push(request) };
                let Request { tag, start, len, op, .. } = request;
                self.sent[usize::from(index)] = Some(Sent { file, tag, start, len, op });
                (request.tag, request.start) = (Tag::new(0, index), ByteOffset(at));
                self.files[file].1.push(request);
            }
            Way::Zeroes => {
                let Request { len, tag, buffer, .. } = request;
                let fits = buffer.as_ref().is_some_and(|buffer| context.buffers.len(buffer) == len);
                let outcome = match &buffer {
                    Some(buffer) if fits && zeroes::fill(context, buffer, 0, len.0) => Outcome::Done(len),
                    _ if fits => admission::FAULT,
                    _ => admission::INVALID,
                };
                completions.push(Completion { outcome, tag, buffer });
            }
            Way::File(..) | Way::Threads => self.for_threads.push(request),
        }
    }

    /// Offers the inner channels their next requests, and reports the number of requests inside the gate.
    fn pass_on(&mut self, context: &mut UringContext, completions: &mut Vec<Completion<Buffer>>) {
        for file in 0..self.files.len() {
            let (channel, batch) = &mut self.files[file];
            if !batch.is_empty() {
                channel.submit(context, batch, &mut self.completed);
                self.translate(completions);
            }
        }
        if !self.for_threads.is_empty() {
            self.threads.submit(context, &mut self.for_threads, completions);
        }
        self.cell.set(self.inside());
        let is_left = !self.for_threads.is_empty() || self.files.iter().any(|(_, batch)| !batch.is_empty());
        self.retry_at = is_left.then(|| Instant::now() + RETRY);
    }

    /// Translates completions of files to those of the disk's requests.
    fn translate(&mut self, completions: &mut Vec<Completion<Buffer>>) {
        for Completion { outcome, tag, buffer } in self.completed.drain(..) {
            let index = tag.index();
            let Some(Sent { tag, start, len, op, .. }) = self.sent[usize::from(index)].take() else { continue };
            self.free.push(index);
            if op == Op::Read && outcome == Outcome::OutOfRange {
                // The file ends within its last cluster: the library knows its content.
                self.for_threads.push(Request { start, len, tag, buffer, op });
            } else {
                completions.push(Completion { outcome, tag, buffer });
            }
        }
    }

    /// Ends requests that no inner channel has taken.
    fn cancel_waiting(&mut self, tags: &[Tag], completions: &mut Vec<Completion<Buffer>>) {
        let aborted = |tag, buffer| Completion { outcome: Outcome::Aborted, tag, buffer };
        let is_picked = |request: &mut Request<Buffer>| tags.binary_search(&request.tag).is_ok();
        let waiting = self.for_threads.extract_if(.., is_picked);
        completions.extend(waiting.map(|request| aborted(request.tag, request.buffer)));
        for (_, batch) in &mut self.files {
            let sent = &self.sent;
            let is_picked = |request: &mut Request<Buffer>| {
                let sent = sent[usize::from(request.tag.index())];
                sent.is_some_and(|sent| tags.binary_search(&sent.tag).is_ok())
            };
            let waiting = batch.extract_if(.., is_picked);
            self.completed.extend(waiting.map(|request| aborted(request.tag, request.buffer)));
        }
        self.translate(completions);
    }
}

impl DiskChannel<UringContext> for Qcow2Channel {
    fn submit(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        completions: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        self.geometry.size = self.size.get();
        // Waiting requests have no place in the context yet.
        let waiting = self.for_threads.len() + self.files.iter().map(|(_, batch)| batch.len()).sum::<usize>();
        let free = MAX_INFLIGHT.saturating_sub(self.outstanding() as usize);
        let taken = batch.len().min(free).min(context.room().saturating_sub(waiting));
        if self.direct.gate.enter(&self.cell, self.inside()) {
            for request in batch.drain(..taken) {
                self.route(context, request, completions);
            }
        } else {
            self.for_threads.extend(batch.drain(..taken));
        }
        self.pass_on(context, completions);
        taken
    }

    fn reap(&mut self, context: &mut UringContext, completions: &mut Vec<Completion<Buffer>>) -> usize {
        let before = completions.len();
        for file in 0..self.files.len() {
            self.files[file].0.reap(context, &mut self.completed);
            self.translate(completions);
        }
        self.threads.reap(context, completions);
        self.pass_on(context, completions);
        completions.len() - before
    }

    fn cancel(&mut self, context: &mut UringContext, tags: &[Tag], completions: &mut Vec<Completion<Buffer>>) {
        self.cancel_waiting(tags, completions);
        self.threads.cancel(context, tags, completions);
        for file in 0..self.files.len() {
            let is_picked = |sent: &Sent| sent.file == file && tags.binary_search(&sent.tag).is_ok();
            let picked = (0..).zip(&self.sent).filter(|(_, sent)| sent.as_ref().is_some_and(is_picked));
            // In order, as the indexes are.
            let picked: Vec<Tag> = picked.map(|(index, _)| Tag::new(0, index)).collect();
            self.files[file].0.cancel(context, &picked, &mut self.completed);
            self.translate(completions);
        }
        self.pass_on(context, completions);
    }

    fn outstanding(&self) -> u32 {
        self.inside() + self.threads.outstanding() + self.for_threads.len() as u32
    }

    fn deadline(&self) -> Option<Instant> {
        let inner =
            self.files.iter().filter(|(file, _)| file.outstanding() > 0).filter_map(|(file, _)| file.deadline());
        let threads = self.threads.deadline().filter(|_| self.threads.outstanding() > 0);
        inner.chain(threads).chain(self.retry_at).min()
    }

    fn close(&mut self, context: &mut UringContext) {
        self.threads.close(context);
        for (file, _) in &mut self.files {
            file.close(context);
        }
    }
}

impl Drop for Qcow2Channel {
    fn drop(&mut self) {
        if self.inside() > 0 {
            // The storage hangs, and the kernel still has writes. No other process may use the image before they have
            // ended: it is not closed, and its locks stay, until the process ends.
            std::mem::forget(Arc::clone(&self.image));
        }
    }
}
