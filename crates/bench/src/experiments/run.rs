//! One experiment on one file system: its stages, its scale, its findings.

use std::path::Path;

use rand::rngs::StdRng;

use crate::error::Result;
use crate::load;
use crate::meter::{Cost, Pass, Profile};
use crate::peer::Peer;
use crate::plan::Plan;
use crate::report::{Findings, Targets};
use crate::stage::Stage;

/// One experiment on one file system in one pass.
pub(crate) struct Run<'a, 'b> {
    pub plan: &'a Plan,
    pub peer: Peer,
    pub pass: Pass,
    pub rng: StdRng,
    pub found: Findings<'b>,
}

impl<'a> Run<'a, '_> {
    pub fn stage(&self) -> Result<Stage<'a>> {
        Stage::new(self.plan, self.peer, self.pass)
    }

    /// A number or size at the scale of the plan; at least `least`.
    pub fn scaled(&self, full: u64, least: u64) -> u64 {
        ((full as f64 * self.plan.scale) as u64).max(least)
    }

    /// Puts the source tree, or as much of it as the scale wants, at `copy`; returns files and
    /// bytes.
    pub fn source_tree(&mut self, copy: &Path) -> Result<(u64, u64)> {
        const FILES: u64 = 21_000;
        let files = self.scaled(FILES, 50);
        match &self.plan.tree {
            Some(tree) => load::copy_some(tree, copy, files),
            None => {
                self.left_out(
                    "no source tree was given (--tree): its files, of 2 KiB each, are made up",
                );
                load::create_files(copy, files, 2048, 1, self.plan.seed)?;
                Ok((files, files * 2048))
            }
        }
    }

    /// Looks at something on a cold stage: seconds, and requests to read.
    pub fn scan(
        &mut self,
        stage: &mut Stage<'_>,
        name: &str,
        targets: Targets,
        scan: impl FnOnce(&Stage<'_>) -> Result<()>,
    ) -> Result<Cost> {
        let cost = stage.cost(scan)?;
        self.found.seconds(name, &cost, targets);
        let reads = cost.requests.reads as f64;
        self.found
            .count(&format!("{name}, reads"), "requests", reads, None);
        Ok(cost)
    }

    /// Whether this pass leaves out a measurement that runs without a limit only. When the plan has
    /// no pass without a limit, the report says so.
    pub fn is_free_only(&mut self, what: &str) -> bool {
        if self.pass != Pass::Throttled {
            return false;
        }
        if self.plan.profiles == [Profile::Gp3] {
            self.left_out(&format!("{what}: not measured on gp3"));
        }
        true
    }

    pub fn left_out(&mut self, why: &str) {
        let line = format!("{}: {why}", self.found.experiment);
        if !self.found.report.left_out.contains(&line) {
            self.found.report.left_out.push(line);
        }
    }
}
