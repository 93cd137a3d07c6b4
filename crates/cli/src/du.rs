//! `ramet du`: the space of a directory tree.

use serde_json::json;

use crate::args::Du;
use crate::control::{Root, mounted};
use crate::failure::Outcome;
use crate::home::refuse_before_init;
use crate::output::say;
use crate::size::Size;

pub fn run(args: &Du) -> Outcome {
    refuse_before_init(&args.dir)?;
    let root = Root::open_tree(&args.dir)?;
    let usage = root.usage().map_err(|e| mounted(&args.dir, e))?;
    let fields = [
        ("logical", usage.logical_bytes),
        ("shared", usage.shared_bytes),
        ("exclusive", usage.exclusive_bytes),
    ];
    if args.json {
        let all = json!({
            "logical_bytes": usage.logical_bytes,
            "shared_bytes": usage.shared_bytes,
            "exclusive_bytes": usage.exclusive_bytes,
        });
        say!("{all:#}")?;
        return Ok(());
    }
    for (name, bytes) in fields {
        say!("{name:<20} {} ({bytes})", Size::new(bytes))?;
    }
    Ok(())
}
