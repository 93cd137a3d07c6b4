//! Nodes: messages, runs, skeletons, and their bytes.

pub(crate) mod block;
pub(crate) mod buffer;
pub(crate) mod filter;
pub(crate) mod handle;
pub(crate) mod message;
pub(crate) mod packed;
pub(crate) mod run_builder;
pub(crate) mod run_index;
pub(crate) mod run_view;
pub(crate) mod skeleton;
pub(crate) mod trailer;
pub(crate) mod wire;
