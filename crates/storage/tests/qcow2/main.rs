//! Images of qcow2 checked by other programs: `qemu-img` and `qemu-io` make them, check them and compare their content.

mod corpus;
mod images;
mod killed;
mod model;
mod tools;
