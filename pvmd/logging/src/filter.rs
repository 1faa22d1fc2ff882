//! Which events are logged.

use crate::record::is_context_span;
use thiserror::Error;
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Metadata, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;
use tracing_subscriber::layer::{self, Context};
use tracing_subscriber::registry::LookupSpan;

/// Environment variable with the filter, in the syntax of `tracing`'s `EnvFilter`.
pub const FILTER_VARIABLE: &str = "SEMPA_LOG_FILTER";
/// Filter that applies if the environment variable is not set. Also the level of all targets that
/// the variable does not name.
pub const DEFAULT_FILTER: &str = "info";

/// Prefixes of the targets of libraries whose events are logged only if the filter names these
/// targets. Some of these libraries emit an event for each packet.
const SILENT_LIBRARIES: [&str; 2] = ["quinn", "zbus"];

/// Reason why a text is not a valid filter.
#[derive(Debug, Error)]
pub enum FilterError {
    /// The contained part of the text is neither a level nor a directive. No filter is created; the
    /// filter in use is unchanged.
    #[error("{0:?} is neither a level nor TARGET=LEVEL")]
    NoLevel(String),
    /// A directive is malformed. No filter is created; the filter in use is unchanged.
    #[error(transparent)]
    MalformedDirective(#[from] ParseError),
}

/// Selects events by level and target.
///
/// Spans that name a migration, checkpoint or job are always enabled: a warning needs its context
/// under the filter `warn`, too.
#[derive(Debug)]
pub struct Filter(EnvFilter);

impl Filter {
    /// Reads the filter from [`FILTER_VARIABLE`].
    ///
    /// If the variable is invalid, returns the default filter and a line of text that reports the
    /// error.
    pub fn from_env() -> (Self, Option<String>) {
        let value = std::env::var_os(FILTER_VARIABLE).unwrap_or_default();
        let value = value.to_string_lossy();
        match Self::parse(&value) {
            Ok(filter) => (filter, None),
            Err(filter_error) => (
                Self::default(),
                Some(format!(
                    "{FILTER_VARIABLE}={value:?} is not a filter: {filter_error}; {DEFAULT_FILTER} is used"
                )),
            ),
        }
    }

    /// Parses a filter: a level, or directives `TARGET=LEVEL`, separated by commas.
    ///
    /// # Errors
    /// A part of `text` is neither a level nor a directive.
    pub fn parse(text: &str) -> Result<Self, FilterError> {
        let nonempty_words = || text.split(',').filter(|word| !word.trim().is_empty());
        // `EnvFilter` reads a word without a level as a target and enables all events of that
        // target.
        let lacks_level =
            |word: &&str| !word.contains(['=', '[']) && word.trim().parse::<LevelFilter>().is_err();
        if let Some(word) = nonempty_words().find(lacks_level) {
            return Err(FilterError::NoLevel(word.to_string()));
        }
        let mut directives = vec![DEFAULT_FILTER.to_string()];
        directives.extend(SILENT_LIBRARIES.map(|library| format!("{library}=off")));
        // A later directive replaces an earlier directive for the same target.
        directives.extend(nonempty_words().map(|word| word.trim().to_string()));
        let env_filter = EnvFilter::builder()
            .with_regex(false)
            .parse(directives.join(","))?;
        Ok(Self(env_filter))
    }

    /// Returns the most verbose level that the filter may enable.
    pub fn max_level(&self) -> LevelFilter {
        self.0.max_level_hint().unwrap_or(LevelFilter::TRACE)
    }
}

impl Default for Filter {
    fn default() -> Self {
        Self::parse("").expect("the default filter is valid")
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
        // `EnvFilter` must see every span, because a directive may name a span.
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

    /// Runs `body` and returns the lines of its events that `filter_text` lets pass.
    fn logged_lines(filter_text: &str, body: impl FnOnce()) -> Vec<String> {
        let records = records_of(Filter::parse(filter_text).expect("a filter"), body);
        records.iter().map(crate::Record::line).collect()
    }

    /// Emits a fixed set of events and returns the first word of each line that `filter_text` lets
    /// pass.
    fn logged_first_words(filter_text: &str) -> Vec<String> {
        let lines = logged_lines(filter_text, || {
            tracing::error!("error");
            let _in_span = tracing::info_span!("migration", id = %"m1").entered();
            tracing::warn!("warn");
            tracing::info!("info");
            tracing::debug!("debug");
            tracing::warn!(target: "quinn_proto::connection", "quinn");
            tracing::debug!(target: "pvmd::machine", "machine");
        });
        let first_word = |line: &String| line.split(' ').next().map(String::from);
        lines.iter().filter_map(first_word).collect()
    }

    #[test]
    fn filter_selects_by_level_and_target() {
        assert_eq!(logged_first_words(""), ["error", "warn", "info"]);
        assert_eq!(logged_first_words("warn"), ["error", "warn"]);
        assert_eq!(
            logged_first_words("debug"),
            ["error", "warn", "info", "debug", "machine"]
        );
        assert_eq!(
            logged_first_words("pvmd::machine=debug, error"),
            ["error", "machine"],
            "other targets have the level of the word alone"
        );
        assert_eq!(
            logged_first_words("quinn=warn"),
            ["error", "warn", "info", "quinn"]
        );
        assert_eq!(logged_first_words("off"), Vec::<String>::new());
    }

    /// A directive can select the events in the span of a migration. Under every filter, the lines
    /// contain the migration's id.
    #[test]
    fn filter_keeps_the_context_of_migrations() {
        assert_eq!(
            logged_first_words("error,[migration]=debug"),
            ["error", "warn", "info", "debug", "quinn", "machine"],
            "in the span all targets are enabled"
        );
        let lines = logged_lines("warn", || {
            let _in_span = tracing::info_span!("migration", id = %"m1").entered();
            tracing::warn!("slow");
        });
        assert_eq!(lines, ["slow (migration m1)"]);
    }

    #[test]
    fn invalid_filter_is_refused() {
        for invalid_filter in ["verbose", "pvmd=loud", "/tmp/log", "info,,x"] {
            let error_text = Filter::parse(invalid_filter)
                .expect_err("not a filter")
                .to_string();
            assert!(
                !error_text.is_empty() && !error_text.contains('\n'),
                "{error_text}"
            );
        }
        assert_eq!(Filter::default().max_level(), LevelFilter::INFO);
    }
}
