//! Plots as SVG text.

use plotters::{
    chart::{ChartBuilder, LabelAreaPosition},
    element::{PathElement, Rectangle},
    prelude::{DrawingArea, IntoDrawingArea, SVGBackend},
    series::LineSeries,
    style::{Color, RGBColor, ShapeStyle, WHITE},
};

use crate::run::BackendRun;

/// Colours that stay apart for the colour-blind (Okabe and Ito 2008).
const COLORS: [RGBColor; 5] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
];

const SIZE: (u32, u32) = (920, 340);

type Drawn = Result<(), Box<dyn std::error::Error>>;
type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// Loss by step, the engines' curves laid over each other: the first widest, so that all can be seen.
pub(super) fn losses(runs: &[BackendRun]) -> String {
    draw(|root| {
        let all = || {
            runs.iter()
                .flat_map(|r| r.losses.iter().copied())
                .filter(|l| l.is_finite())
        };
        let (low, high) = (
            all().fold(f64::MAX, f64::min),
            all().fold(f64::MIN, f64::max),
        );
        let margin = ((high - low) * 0.05).max(1e-6);
        let steps = runs
            .iter()
            .map(|r| r.losses.len())
            .max()
            .unwrap_or(1)
            .max(2);
        let mut chart = ChartBuilder::on(root)
            .margin(12)
            .set_label_area_size(LabelAreaPosition::Left, 60)
            .set_label_area_size(LabelAreaPosition::Bottom, 40)
            .build_cartesian_2d(1.0..steps as f64, (low - margin)..(high + margin))?;
        chart
            .configure_mesh()
            .x_desc("step")
            .y_desc("loss")
            .light_line_style(WHITE)
            .draw()?;
        for (i, run) in runs.iter().enumerate() {
            let style = ShapeStyle::from(COLORS[i % COLORS.len()])
                .stroke_width(2 * (runs.len() - i) as u32);
            let points = run
                .losses
                .iter()
                .enumerate()
                .map(|(n, &l)| (n as f64 + 1.0, l));
            chart
                .draw_series(LineSeries::new(points, style))?
                .label(&run.backend)
                .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], style));
        }
        chart
            .configure_series_labels()
            .background_style(WHITE)
            .border_style(WHITE)
            .draw()?;
        Ok(())
    })
}

/// Median wall and CPU seconds of a step, a pair of bars an engine.
pub(super) fn step_times(runs: &[BackendRun]) -> String {
    draw(|root| {
        let top = runs
            .iter()
            .map(|r| r.step_seconds.max(r.cpu_seconds))
            .fold(1e-9, f64::max)
            * 1.15;
        let mut chart = ChartBuilder::on(root)
            .margin(12)
            .set_label_area_size(LabelAreaPosition::Left, 60)
            .set_label_area_size(LabelAreaPosition::Bottom, 40)
            .build_cartesian_2d(0.0..runs.len() as f64, 0.0..top)?;
        let names: Vec<&str> = runs.iter().map(|r| r.backend.as_str()).collect();
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(WHITE)
            .x_labels(runs.len() * 2 + 1)
            .x_label_formatter(&|x| {
                let middle = (x.fract() - 0.5).abs() < 0.01;
                names
                    .get(*x as usize)
                    .filter(|_| middle)
                    .map_or(String::new(), |n| (*n).to_owned())
            })
            .y_desc("seconds a step")
            .draw()?;
        let bars = [
            ("wall", 0.18, COLORS[0]),
            ("CPU, all ranks", 0.52, COLORS[1]),
        ];
        for (b, (label, at, color)) in bars.into_iter().enumerate() {
            let height = |r: &BackendRun| {
                if b == 0 {
                    r.step_seconds
                } else {
                    r.cpu_seconds
                }
            };
            chart
                .draw_series(runs.iter().enumerate().map(|(i, run)| {
                    let left = i as f64 + at;
                    Rectangle::new([(left, 0.0), (left + 0.3, height(run))], color.filled())
                }))?
                .label(label)
                .legend(move |(x, y)| {
                    Rectangle::new([(x, y - 5), (x + 12, y + 5)], color.filled())
                });
        }
        chart
            .configure_series_labels()
            .background_style(WHITE)
            .border_style(WHITE)
            .draw()?;
        Ok(())
    })
}

/// An SVG; where drawing fails, a line that says so in its place.
fn draw(body: impl FnOnce(&Area<'_>) -> Drawn) -> String {
    let mut svg = String::new();
    let outcome = {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        root.fill(&WHITE)
            .map_err(Into::into)
            .and_then(|()| body(&root))
            .and_then(|()| root.present().map_err(Into::into))
    };
    match outcome {
        Ok(()) => svg,
        Err(fault) => format!("<p>This plot could not be drawn: {fault}</p>"),
    }
}
