//! Which events are logged.

use crate::record::is_context_span;
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Metadata, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::{self, Context};
use tracing_subscriber::registry::LookupSpan;

/// Environment variable with the filter, in the syntax of `tracing`'s `EnvFilter`.
pub const FILTER_VARIABLE: &str = "SEMPA_LOG_FILTER";
/// Filter without an environment variable, and the level of all targets that the variable does not
/// name.
pub const DEFAULT_FILTER: &str = "info";

/// Libraries whose events are logged only if the filter names them: some emit events per packet.
/// The names are prefixes of targets.
const SILENT_LIBRARIES: [&str; 2] = ["quinn", "zbus"];

/// Selects events by level and target.
///
/// Spans that name a migration, checkpoint or job are always enabled: a warning needs its context
/// under the filter `warn`, too.
#[derive(Debug)]
pub struct Filter(EnvFilter);

impl Filter {
    /// Reads the filter from [`FILTER_VARIABLE`].
    ///
    /// An invalid filter yields the default and a line that reports the error.
    pub fn from_env() -> (Filter, Option<String>) {
        let value = std::env::var_os(FILTER_VARIABLE).unwrap_or_default();
        let value = value.to_string_lossy();
        match Filter::parse(&value) {
            Ok(filter) => (filter, None),
            Err(why) => (
                Filter::default(),
                Some(format!(
                    "{FILTER_VARIABLE}={value:?} is not a filter: {why}; {DEFAULT_FILTER} is used"
                )),
            ),
        }
    }

    /// Parses a filter: a level, or directives `TARGET=LEVEL` that are separated by commas.
    ///
    /// # Errors
    /// The reason why `text` is not a filter.
    pub fn parse(text: &str) -> Result<Filter, String> {
        let words = || text.split(',').filter(|word| !word.trim().is_empty());
        // `EnvFilter` takes such a word as a target whose events are all enabled.
        let is_unclear =
            |word: &&str| !word.contains(['=', '[']) && word.trim().parse::<LevelFilter>().is_err();
        if let Some(word) = words().find(is_unclear) {
            return Err(format!("{word:?} is neither a level nor TARGET=LEVEL"));
        }
        let mut directives = vec![DEFAULT_FILTER.to_string()];
        directives.extend(SILENT_LIBRARIES.map(|library| format!("{library}=off")));
        // A later directive replaces an earlier one for the same target.
        directives.extend(words().map(|word| word.trim().to_string()));
        EnvFilter::builder()
            .with_regex(false)
            .parse(directives.join(","))
            .map(Filter)
            .map_err(|error| error.to_string())
    }

    /// Returns the most verbose level that an event may have.
    pub fn max_level(&self) -> LevelFilter {
        self.0.max_level_hint().unwrap_or(LevelFilter::TRACE)
    }
}

impl Default for Filter {
    fn default() -> Filter {
        Filter::parse("").expect("the default filter is valid")
    }
}

impl<S> layer::Filter<S> for Filter
where
    S: Subscriber + for<'span> LookupSpan<'span>,
{
    fn enabled(&self, metadata: &Metadata<'_>, context: &Context<'_, S>) -> bool {
        layer::Filter::enabled(&self.0, metadata, context) || is_context_span(metadata)
    }

    fn callsite_enabled(&self, metadata: &'static Metadata<'static>) -> Interest {
        // `EnvFilter` must see all spans, because a directive may name one.
        let interest = layer::Filter::<S>::callsite_enabled(&self.0, metadata);
        if is_context_span(metadata) {
            Interest::always()
        } else {
            interest
        }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        self.0
            .max_level_hint()
            .map(|level| level.max(LevelFilter::INFO))
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        layer::Filter::on_new_span(&self.0, attributes, id, context);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        layer::Filter::on_record(&self.0, id, values, context);
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        layer::Filter::on_enter(&self.0, id, context);
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        layer::Filter::on_exit(&self.0, id, context);
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        layer::Filter::on_close(&self.0, id, context);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::records_of;

    /// Returns the lines of the events of `body` that are logged with this filter.
    fn lines_of(filter: &str, body: impl FnOnce()) -> Vec<String> {
        let records = records_of(Filter::parse(filter).expect("a filter"), body);
        records.iter().map(crate::Record::line).collect()
    }

    /// Returns the first words of the lines that are logged with this filter.
    fn logged(filter: &str) -> Vec<String> {
        let lines = lines_of(filter, || {
            tracing::error!("error");
            let _in_span = tracing::info_span!("migration", id = %"m1").entered();
            tracing::warn!("warn");
            tracing::info!("info");
            tracing::debug!("debug");
            tracing::warn!(target: "quinn_proto::connection", "quinn");
            tracing::debug!(target: "pvmd::machine", "machine");
        });
        let of_line = |line: &String| line.split(' ').next().map(String::from);
        lines.iter().filter_map(of_line).collect()
    }

    #[test]
    fn filter_selects_by_level_and_target() {
        assert_eq!(logged(""), ["error", "warn", "info"]);
        assert_eq!(logged("warn"), ["error", "warn"]);
        assert_eq!(
            logged("debug"),
            ["error", "warn", "info", "debug", "machine"]
        );
        assert_eq!(
            logged("pvmd::machine=debug, error"),
            ["error", "machine"],
            "other targets have the level of the word alone"
        );
        assert_eq!(logged("quinn=warn"), ["error", "warn", "info", "quinn"]);
        assert_eq!(logged("off"), Vec::<String>::new());
    }

    /// A span of a migration can be selected, and its id is in the lines under every filter.
    #[test]
    fn filter_keeps_the_context_of_migrations() {
        assert_eq!(
            logged("error,[migration]=debug"),
            ["error", "warn", "info", "debug", "quinn", "machine"],
            "in the span all targets are enabled"
        );
        let lines = lines_of("warn", || {
            let _in_span = tracing::info_span!("migration", id = %"m1").entered();
            tracing::warn!("slow");
        });
        assert_eq!(lines, ["slow (migration m1)"]);
    }

    #[test]
    fn invalid_filter_is_refused() {
        for wrong in ["verbose", "pvmd=loud", "/tmp/log", "info,,x"] {
            let why = Filter::parse(wrong).expect_err("not a filter");
            assert!(!why.is_empty() && !why.contains('\n'), "{why}");
        }
        assert_eq!(Filter::default().max_level(), LevelFilter::INFO);
    }
}
