//! Images of qcow2 by the judgement of others: `qemu-img` and `qemu-io` make them, check them and compare them with what they must hold.

mod images;
mod killed;
mod model;
mod tools;
