//! Draws line charts as SVG, with logarithmic axes or with linear axes from zero.

use serde::Serialize;
use std::fmt::Write;

/// One line of a chart and its name.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Series {
    /// Name of the line in the legend.
    pub(crate) name: String,
    /// (x, y) pairs. Both are positive if the axes are logarithmic.
    pub(crate) points: Vec<(f64, f64)>,
    /// (x, 99th percentile of y) pairs; empty if the percentiles were not measured.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) p99: Vec<(f64, f64)>,
}

/// A line chart with its labels.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Chart {
    /// File name without extension.
    pub(crate) name: String,
    pub(crate) title: String,
    /// Label of the x axis.
    pub(crate) x: String,
    /// Label of the y axis.
    pub(crate) y: String,
    /// True if larger y values are better (y is a rate); false if smaller y values are better (y is
    /// a time).
    pub(crate) more_is_better: bool,
    pub(crate) series: Vec<Series>,
}

const CHART_WIDTH: f64 = 820.0;
const CHART_HEIGHT: f64 = 480.0;
const LEFT_MARGIN: f64 = 76.0;
const RIGHT_MARGIN: f64 = 210.0;
const TOP_MARGIN: f64 = 44.0;
const BOTTOM_MARGIN: f64 = 56.0;
/// Colours that people with colour vision deficiency can distinguish.
const SERIES_COLOURS: [&str; 8] = [
    "#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a00",
];

/// Scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scale {
    /// Values with equal ratios have equal distances.
    Logarithmic,
    /// Values with equal differences have equal distances.
    Linear,
}

/// An axis of a chart. A logarithmic axis extends between the powers of ten that enclose all
/// values. A linear axis extends from zero to a round number that is not less than the largest
/// value.
struct Axis {
    scale: Scale,
    /// Value at the start of the axis. For a logarithmic axis: the base-10 logarithm of this value.
    low_value: f64,
    /// Value at the end of the axis. For a logarithmic axis: the base-10 logarithm of this value.
    high_value: f64,
    /// Distance between two grid lines, in the units of `low_value` and `high_value`.
    grid_step: f64,
    start_coordinate: f64,
    end_coordinate: f64,
}

/// Maximum number of grid lines on a linear axis.
const GRID_LINE_COUNT_MAX: f64 = 8.0;

impl Axis {
    fn new_enclosing(
        scale: Scale,
        values: impl Iterator<Item = f64> + Clone,
        start_coordinate: f64,
        end_coordinate: f64,
    ) -> Self {
        let value_min = values.clone().fold(f64::INFINITY, f64::min);
        let value_max = values.fold(0.0, f64::max);
        if scale == Scale::Logarithmic {
            let low_value = value_min.log10().floor();
            return Self {
                scale,
                low_value,
                high_value: value_max.log10().ceil().max(low_value + 1.0),
                grid_step: 1.0,
                start_coordinate,
                end_coordinate,
            };
        }
        let value_max = if value_max > 0.0 { value_max } else { 1.0 };
        let power_of_ten = 10f64.powf((value_max / GRID_LINE_COUNT_MAX).log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0]
            .map(|multiple| multiple * power_of_ten)
            .into_iter()
            .find(|step| value_max / step <= GRID_LINE_COUNT_MAX);
        let step = step.unwrap_or(10.0 * power_of_ten);
        Self {
            scale,
            low_value: 0.0,
            high_value: step * (value_max / step).ceil().max(1.0),
            grid_step: step,
            start_coordinate,
            end_coordinate,
        }
    }

    fn coordinate(&self, value: f64) -> f64 {
        let value = if self.scale == Scale::Logarithmic {
            value.log10()
        } else {
            value
        };
        let fraction = (value - self.low_value) / (self.high_value - self.low_value);
        self.start_coordinate + fraction * (self.end_coordinate - self.start_coordinate)
    }

    fn tick_values(&self) -> impl Iterator<Item = f64> {
        let line_count = ((self.high_value - self.low_value) / self.grid_step).round() as u32;
        let tick_value = move |line: u32| self.low_value + self.grid_step * f64::from(line);
        (0..=line_count).map(move |line| {
            if self.scale == Scale::Logarithmic {
                10f64.powf(tick_value(line))
            } else {
                tick_value(line)
            }
        })
    }
}

impl Chart {
    /// Draws the chart with logarithmic axes. Returns `None` if the chart has no points.
    pub(crate) fn logarithmic_svg(&self) -> Option<String> {
        self.draw_svg(Scale::Logarithmic, true)
    }

    /// Draws the chart with linear axes. Point markers are omitted, because the lines of such
    /// charts have many points. Returns `None` if the chart has no points.
    pub(crate) fn linear_svg(&self) -> Option<String> {
        self.draw_svg(Scale::Linear, false)
    }

    fn draw_svg(&self, scale: Scale, has_markers: bool) -> Option<String> {
        let points = || self.series.iter().flat_map(|series| series.points.iter());
        points().next()?;
        let x_axis = Axis::new_enclosing(
            scale,
            points().map(|point| point.0),
            LEFT_MARGIN,
            CHART_WIDTH - RIGHT_MARGIN,
        );
        let y_axis = Axis::new_enclosing(
            scale,
            points().map(|point| point.1),
            CHART_HEIGHT - BOTTOM_MARGIN,
            TOP_MARGIN,
        );
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{CHART_WIDTH}\" height=\"{CHART_HEIGHT}\" viewBox=\"0 0 {CHART_WIDTH} {CHART_HEIGHT}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
        );
        write_text(
            &mut svg,
            LEFT_MARGIN,
            24.0,
            "start",
            &format!("{}", BoldText(&self.title)),
        );
        write_text(
            &mut svg,
            (LEFT_MARGIN + CHART_WIDTH - RIGHT_MARGIN) / 2.0,
            CHART_HEIGHT - 14.0,
            "middle",
            &escape_xml(&self.x),
        );
        let rotation = format!("transform=\"rotate(-90 16 {0})\"", CHART_HEIGHT / 2.0);
        let _ = writeln!(
            svg,
            "<text x=\"16\" y=\"{}\" text-anchor=\"middle\" {rotation}>{}</text>",
            CHART_HEIGHT / 2.0,
            escape_xml(&self.y)
        );
        for tick in x_axis.tick_values() {
            write_grid_line(
                &mut svg,
                (x_axis.coordinate(tick), y_axis.start_coordinate),
                (x_axis.coordinate(tick), y_axis.end_coordinate),
            );
            write_text(
                &mut svg,
                x_axis.coordinate(tick),
                y_axis.start_coordinate + 18.0,
                "middle",
                &tick_label(tick),
            );
        }
        for tick in y_axis.tick_values() {
            write_grid_line(
                &mut svg,
                (x_axis.start_coordinate, y_axis.coordinate(tick)),
                (x_axis.end_coordinate, y_axis.coordinate(tick)),
            );
            write_text(
                &mut svg,
                x_axis.start_coordinate - 6.0,
                y_axis.coordinate(tick) + 4.0,
                "end",
                &tick_label(tick),
            );
        }
        self.write_series(&mut svg, &x_axis, &y_axis, has_markers);
        svg.push_str("</svg>\n");
        Some(svg)
    }

    /// Draws the lines of all series and the legend.
    fn write_series(&self, svg: &mut String, x_axis: &Axis, y_axis: &Axis, has_markers: bool) {
        for (series_index, (series, colour)) in self
            .series
            .iter()
            .zip(SERIES_COLOURS.iter().cycle())
            .enumerate()
        {
            let line: Vec<String> = series
                .points
                .iter()
                .map(|(point_x, point_y)| {
                    format!(
                        "{:.1},{:.1}",
                        x_axis.coordinate(*point_x),
                        y_axis.coordinate(*point_y)
                    )
                })
                .collect();
            let _ = writeln!(
                svg,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
                line.join(" ")
            );
            for (point_x, point_y) in series.points.iter().filter(|_| has_markers) {
                let _ = writeln!(
                    svg,
                    "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"><title>{}: {point_x} {point_y:.3}</title></circle>",
                    x_axis.coordinate(*point_x),
                    y_axis.coordinate(*point_y),
                    escape_xml(&series.name)
                );
            }
            let (legend_x, line) = (
                CHART_WIDTH - RIGHT_MARGIN + 16.0,
                TOP_MARGIN + 10.0 + 20.0 * series_index as f64,
            );
            let _ = writeln!(
                svg,
                "<rect x=\"{legend_x}\" y=\"{}\" width=\"14\" height=\"4\" fill=\"{colour}\"/>",
                line - 6.0
            );
            write_text(
                svg,
                legend_x + 20.0,
                line,
                "start",
                &escape_xml(&series.name),
            );
        }
    }
}

struct BoldText<'a>(&'a str);

impl std::fmt::Display for BoldText<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "<tspan font-weight=\"bold\">{}</tspan>",
            escape_xml(self.0)
        )
    }
}

/// Escapes text for XML.
fn escape_xml(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

fn write_text(svg: &mut String, x: f64, y: f64, anchor: &str, content: &str) {
    let _ = writeln!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{content}</text>"
    );
}

fn write_grid_line(svg: &mut String, from: (f64, f64), to: (f64, f64)) {
    let _ = writeln!(
        svg,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"#dddddd\"/>",
        from.0, from.1, to.0, to.1
    );
}

/// Formats a tick value with a unit prefix, for instance 2000 as `2k`.
fn tick_label(value: f64) -> String {
    for (factor, prefix) in [(1e9, "G"), (1e6, "M"), (1e3, "k")] {
        if value >= factor {
            return format!("{}{prefix}", value / factor);
        }
    }
    format!("{}", (value * 1e9).round() / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart_of_points(points: Vec<(f64, f64)>) -> Chart {
        let series = vec![Series {
            name: "a & b".into(),
            points,
            ..Series::default()
        }];
        Chart {
            name: "c".into(),
            title: "t".into(),
            x: "x".into(),
            y: "y".into(),
            more_is_better: false,
            series,
        }
    }

    /// Points are drawn between the axes. Larger values are further to the right or higher.
    #[test]
    fn points_lie_inside_axes() {
        let svg = chart_of_points(vec![(8.0, 0.3), (1e6, 200.0)])
            .logarithmic_svg()
            .expect("two points");
        let polyline = svg
            .lines()
            .find(|polyline| polyline.starts_with("<polyline"))
            .expect("a line");
        let numbers = polyline
            .split('"')
            .nth(1)
            .expect("points")
            .replace(' ', ",");
        let coordinates: Vec<f64> = numbers
            .split(',')
            .map(|word| word.parse().expect("a number"))
            .collect();
        assert!(coordinates[0] < coordinates[2] && coordinates[1] > coordinates[3]);
        assert!(
            coordinates[0] >= LEFT_MARGIN
                && coordinates[2] <= CHART_WIDTH - RIGHT_MARGIN
                && coordinates[3] >= TOP_MARGIN
                && coordinates[1] <= CHART_HEIGHT - BOTTOM_MARGIN
        );
        assert!(svg.contains("a &amp; b") && !svg.contains("a & b"));
    }

    /// A single point is drawn. A chart without points is not drawn.
    #[test]
    fn empty_chart_is_not_drawn() {
        assert!(
            chart_of_points(vec![(10.0, 10.0)])
                .logarithmic_svg()
                .expect("one point")
                .contains("<circle")
        );
        assert!(chart_of_points(Vec::new()).logarithmic_svg().is_none());
    }

    /// Linear axes start at zero and end at a round number.
    #[test]
    fn linear_axes_span_zero_to_round_number() {
        let axis = |value_max: f64| {
            Axis::new_enclosing(
                Scale::Linear,
                [value_max / 3.0, value_max].into_iter(),
                0.0,
                100.0,
            )
        };
        for (value_max, high, line_count) in [
            (814.0, 1000.0, 6),
            (0.3, 0.3, 7),
            (8.0, 8.0, 9),
            (0.0, 1.0, 6),
        ] {
            let axis = axis(value_max);
            assert!(
                (axis.high_value - high).abs() < 1e-9 && axis.tick_values().count() == line_count,
                "{value_max}: {}",
                axis.high_value
            );
            assert_eq!(
                (axis.coordinate(0.0), axis.coordinate(axis.high_value)),
                (0.0, 100.0)
            );
        }
        assert!(
            chart_of_points(vec![(0.0, 0.0), (168.0, 400.0)])
                .linear_svg()
                .expect("two points")
                .contains("<polyline")
        );
    }

    /// Powers of ten are formatted with unit prefixes.
    #[test]
    fn tick_labels_use_prefixes() {
        assert_eq!(
            [0.1, 1.0, 100.0, 1e3, 1e7].map(tick_label),
            ["0.1", "1", "100", "1k", "10M"]
        );
    }
}
