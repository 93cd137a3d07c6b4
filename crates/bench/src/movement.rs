//! Figures that moved between two reports.

use crate::meter::Profile;
use crate::report::{Better, Figure, Report};

/// A cell that both reports have.
#[derive(Clone, Debug, PartialEq)]
pub struct Movement {
    /// The cell as it was.
    pub before: Figure,
    /// As it is.
    pub after: Figure,
}

impl Movement {
    /// The new median over the old one; `None` where one of them is not above zero.
    pub fn ratio(&self) -> Option<f64> {
        let (before, after) = (self.before.median(), self.after.median());
        (before > 0.0 && after > 0.0).then(|| after / before)
    }

    /// Whether the change is larger than the spread of both, and a twentieth.
    pub fn matters(&self) -> bool {
        let noise = self.before.spread().max(self.after.spread()).max(0.05);
        let raw = self.before.profile == Some(Profile::Raw);
        // Other work of the machine shows in `raw` even where a few repetitions agree.
        let noise = if raw { noise.max(0.25) } else { noise };
        let (before, after) = (self.before.median(), self.after.median());
        (after - before).abs() > noise * before.abs()
    }

    /// Whether it went the good way.
    pub fn is_better(&self) -> bool {
        match self.before.better {
            Better::Less => self.after.median() < self.before.median(),
            Better::More => self.after.median() > self.before.median(),
        }
    }
}

/// The cells of both reports, in the order of the first.
pub fn compare(before: &Report, after: &Report) -> Vec<Movement> {
    let pair = |figure: &Figure| {
        let after = after
            .figures
            .iter()
            .find(|other| figure.is_cell_of(other))?;
        Some(Movement {
            before: figure.clone(),
            after: after.clone(),
        })
    };
    before.figures.iter().filter_map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_is_no_movement() {
        let figure = |values: &[f64]| Figure {
            experiment: "E1".into(),
            name: "space".into(),
            unit: "x".into(),
            better: Better::More,
            profile: None,
            peer: "ramet".into(),
            target: None,
            relative: None,
            values: values.into(),
        };
        let movement = |before: &[f64], after: &[f64]| Movement {
            before: figure(before),
            after: figure(after),
        };
        assert!(!movement(&[100.0, 90.0, 110.0], &[115.0]).matters());
        assert!(movement(&[100.0], &[115.0]).matters());
        assert!(movement(&[100.0], &[115.0]).is_better());
        assert!(!movement(&[100.0], &[85.0]).is_better());
        let shrank = movement(&[-1.0], &[-2.0]);
        assert_eq!(
            (shrank.ratio(), shrank.matters(), shrank.is_better()),
            (None, true, false)
        );
        assert!(!movement(&[0.0], &[0.0]).matters());
    }
}
