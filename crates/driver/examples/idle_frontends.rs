//! Frontends that are connected and do nothing: `idle_frontends FOLDER FIRST LAST` connects one, with one queue, to
//! each of the sockets FOLDER/FIRST.sock to FOLDER/LAST.sock, prints "connected" and stays until it is killed. For
//! `scripts/many-disks.sh`.
#![allow(clippy::print_stdout, reason = "its output says when the frontends are connected")]

use std::error::Error;
use std::path::Path;

use mqblk_core::ByteLen;
use mqblk_driver::virtio_blk::{BlkConnectOptions, BlkDevice};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, first, last] = &arguments[..] else {
        return Err(format!("found {} arguments, expected FOLDER FIRST LAST", arguments.len()).into());
    };
    let connect = |number: u32| {
        let socket = Path::new(folder).join(format!("{number}.sock"));
        let size = BlkConnectOptions {
            queues: 1,
            queue_size: 128,
            data_per_queue: ByteLen(4096),
            ..BlkConnectOptions::new(socket)
        };
        BlkDevice::connect(&size)
    };
    let frontends = (first.parse()?..=last.parse()?).map(connect).collect::<Result<Vec<BlkDevice>, _>>()?;
    println!("connected {}", frontends.len());
    loop {
        std::thread::park();
    }
}
