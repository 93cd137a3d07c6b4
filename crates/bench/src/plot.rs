//! Plots in SVG, drawn from a report.

use std::path::{Path, PathBuf};

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::error::{Error, Result};
use crate::report::{Figure, Report, Series};

const SIZE: (u32, u32) = (800, 420);
const FONT: &str = "sans-serif";
const AXIS_LEAST: f64 = 1e-6;

type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

impl Report {
    /// Draws a bar chart for each row in which several file systems are, and lines for each series; returns the files.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn plot(&self, dir: &Path) -> Result<Vec<PathBuf>> {
        let mut made = Vec::new();
        let mut draw = |name: &str, drawn: &dyn Fn(DrawingArea<SVGBackend<'_>, Shift>) -> Drawn| {
            let path = dir.join(format!("{}.svg", slug(name)));
            let area = SVGBackend::new(&path, SIZE).into_drawing_area();
            drawn(area).map_err(|e| Error::Unexpected(format!("{}: {e}", path.display())))?;
            made.push(path);
            Ok::<(), Error>(())
        };
        for row in self.rows().iter().filter(|row| row.len() > 1) {
            let profile = row[0].profile.map(|p| format!(" {p}")).unwrap_or_default();
            let name = format!("{} {}{profile}", row[0].experiment, row[0].name);
            draw(&name, &|area| bars(&area, &name, row))?;
        }
        let mut names: Vec<(&str, &str)> = Vec::new();
        for series in &self.series {
            let name = (series.experiment.as_str(), series.name.as_str());
            if names.contains(&name) {
                continue;
            }
            names.push(name);
            let same = |s: &&Series| (s.experiment.as_str(), s.name.as_str()) == name;
            let all: Vec<&Series> = self.series.iter().filter(same).collect();
            let title = format!("{} {}", name.0, name.1);
            draw(&title, &|area| lines(&area, &title, &all))?;
        }
        Ok(made)
    }
}

fn slug(name: &str) -> String {
    let plain = name.chars().map(|c| {
        if c.is_ascii_alphanumeric() {
            c.to_ascii_lowercase()
        } else {
            ' '
        }
    });
    let plain: String = plain.collect();
    plain.split_whitespace().collect::<Vec<_>>().join("-")
}

fn bars(area: &DrawingArea<SVGBackend<'_>, Shift>, title: &str, row: &[&Figure]) -> Drawn {
    area.fill(&WHITE)?;
    let most = row.iter().map(|f| f.median()).fold(0.0, f64::max);
    let least = row.iter().map(|f| f.median()).fold(0.0, f64::min);
    // An axis must have a length that its marks can divide.
    let most = if most - least < AXIS_LEAST {
        least + AXIS_LEAST
    } else {
        most
    };
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{title}, {}", row[0].unit), (FONT, 18))
        .margin(12)
        .x_label_area_size(28)
        .y_label_area_size(64)
        .build_cartesian_2d(
            (0..row.len() as i32 - 1).into_segmented(),
            least * 1.1..most * 1.1,
        )?;
    let label = |at: &SegmentValue<i32>| match at {
        SegmentValue::CenterOf(at) => {
            let figure = usize::try_from(*at).ok().and_then(|at| row.get(at));
            figure.map_or(String::new(), |figure| figure.peer.clone())
        }
        _ => String::new(),
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_label_formatter(&label)
        .x_labels(row.len())
        .draw()?;
    chart.draw_series(row.iter().enumerate().map(|(at, figure)| {
        let at = at as i32;
        let mut bar = Rectangle::new(
            [
                (SegmentValue::Exact(at), 0.0),
                (SegmentValue::Exact(at + 1), figure.median()),
            ],
            Palette99::pick(at as usize).filled(),
        );
        bar.set_margin(0, 0, 14, 14);
        bar
    }))?;
    area.present()?;
    Ok(())
}

fn lines(area: &DrawingArea<SVGBackend<'_>, Shift>, title: &str, all: &[&Series]) -> Drawn {
    area.fill(&WHITE)?;
    let points = || all.iter().flat_map(|series| series.points.iter());
    if points().count() < 2 {
        return Ok(());
    }
    let x_most = points().map(|p| p.0).fold(AXIS_LEAST, f64::max);
    let x_least = points().map(|p| p.0).fold(f64::MAX, f64::min).min(x_most);
    let y_most = points().map(|p| p.1).fold(AXIS_LEAST, f64::max);
    let y_least = points()
        .map(|p| p.1)
        .filter(|y| *y > 0.0)
        .fold(y_most, f64::min);
    let mut chart = ChartBuilder::on(area)
        .caption(title, (FONT, 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(64)
        // What is compared here differs by powers of ten.
        .build_cartesian_2d(x_least..x_most, (y_least / 2.0..y_most * 2.0).log_scale())?;
    chart
        .configure_mesh()
        .x_desc(all[0].along.as_str())
        .draw()?;
    for (at, series) in all.iter().enumerate() {
        let color = Palette99::pick(at).stroke_width(2);
        chart
            .draw_series(LineSeries::new(series.points.iter().copied(), color))?
            .label(series.peer.as_str())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color));
    }
    chart
        .configure_series_labels()
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::report::Better;

    #[test]
    fn every_row_and_series_is_drawn_also_where_nothing_was_counted() {
        let figure = |name: &str, peer: &str, value| Figure {
            experiment: "E1".into(),
            name: name.into(),
            unit: "x".into(),
            better: Better::Less,
            profile: None,
            peer: peer.into(),
            target: None,
            relative: None,
            values: vec![value],
        };
        let series = |peer: &str, points: &[(f64, f64)]| Series {
            experiment: "E2".into(),
            name: "clone (head,head)".into(),
            along: "round".into(),
            peer: peer.into(),
            points: points.into(),
        };
        let report = Report {
            scale: 1.0,
            seed: 1,
            rounds: 16,
            commands: Vec::new(),
            machine: BTreeMap::new(),
            figures: vec![
                figure("none", "ramet", 0.0),
                figure("none", "xfs", 0.0),
                figure("both ways", "ramet", -3.0),
                figure("both ways", "xfs", 2e9),
                figure("alone", "ramet", 1.0),
            ],
            series: vec![
                series("ramet", &[(1.0, 0.1), (2.0, 0.0)]),
                series("xfs", &[(1.0, 10.0), (2.0, 30.0)]),
            ],
            left_out: Vec::new(),
        };
        let dir = tempfile::tempdir().expect("a folder can be made");
        let made = report.plot(dir.path()).expect("it draws");
        let names: Vec<_> = made.iter().filter_map(|path| path.file_stem()).collect();
        assert_eq!(names, ["e1-none", "e1-both-ways", "e2-clone-head-head"]);
        for path in made {
            let text = std::fs::read_to_string(path).expect("it was written");
            assert!(text.contains("ramet") && text.contains("xfs"), "{text}");
        }
    }
}
