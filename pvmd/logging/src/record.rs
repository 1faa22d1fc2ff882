//! Conversion of events to lines of text.

use std::fmt::{Debug, Write};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

/// Kinds of ids that an event can have. A line contains the ids in this order.
pub const CONTEXT_NAMES: [&str; 3] = ["migration", "checkpoint", "job"];
/// Field with the id in the spans of [`CONTEXT_NAMES`].
const ID_FIELD: &str = "id";

/// True if the name of this span is one of [`CONTEXT_NAMES`]: the span names the migration,
/// checkpoint or job of its events.
pub(crate) fn is_context_span(metadata: &Metadata<'_>) -> bool {
    metadata.is_span() && context_index(metadata.name()).is_some()
}

fn context_index(name: &str) -> Option<usize> {
    CONTEXT_NAMES
        .iter()
        .position(|context_name| *context_name == name)
}

/// An event to be logged.
#[derive(Clone, Debug)]
pub struct Record {
    pub level: Level,
    /// Module or component that logs, like `pvmd::shell::images`.
    pub target: String,
    /// The message, followed by all fields of the event that are not ids, as `name=value`.
    pub text: String,
    /// Ids in the order of [`CONTEXT_NAMES`].
    pub context: [Option<String>; CONTEXT_NAMES.len()],
}

impl Record {
    /// Returns the line of the record: its text, followed by the ids of the context that the text
    /// does not contain, as in `text (migration m5)`.
    pub fn line(&self) -> String {
        let mut line = self.text.clone();
        let unnamed_ids: Vec<String> = CONTEXT_NAMES
            .iter()
            .zip(&self.context)
            .filter_map(|(name, id)| id.as_ref().map(|id| (name, id)))
            .filter(|(_, id)| !names_id(&self.text, id))
            .map(|(name, id)| format!("{name} {id}"))
            .collect();
        if !unnamed_ids.is_empty() {
            line.push_str(&format!(" ({})", unnamed_ids.join(", ")));
        }
        line
    }

    /// Returns the prefix of lines of this level; empty for the level "info".
    pub fn level_prefix(&self) -> &'static str {
        match self.level {
            Level::ERROR => "error: ",
            Level::WARN => "warning: ",
            Level::INFO => "",
            Level::DEBUG => "debug: ",
            Level::TRACE => "trace: ",
        }
    }
}

/// True if `text` contains `id` as a whole word. For example, a text with `m50` does not contain
/// the id `m5`.
fn names_id(text: &str, id: &str) -> bool {
    let is_word_char = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
    text.match_indices(id).any(|(offset, _)| {
        let (text_before, text_after) = (&text[..offset], &text[offset + id.len()..]);
        !is_word_char(text_before.chars().next_back()) && !is_word_char(text_after.chars().next())
    })
}

/// Id of a span whose name is in [`CONTEXT_NAMES`]; stored in the span's extensions.
struct SpanContext {
    name_index: usize,
    id: String,
}

/// Visitor that collects the fields of an event.
#[derive(Default)]
struct EventFields {
    text: String,
    other_fields: String,
    context: [Option<String>; CONTEXT_NAMES.len()],
}

impl Visit for EventFields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.text = format!("{value:?}");
        } else if let Some(index) = context_index(field.name()) {
            self.context[index] = Some(format!("{value:?}"));
        } else {
            let _ = write!(self.other_fields, " {}={value:?}", field.name());
        }
    }
}

/// Visitor that reads the field with the id of a span.
#[derive(Default)]
struct SpanId(Option<String>);

impl Visit for SpanId {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == ID_FIELD {
            self.0 = Some(format!("{value:?}"));
        }
    }
}

/// Layer that passes a [`Record`] of each event to a function.
pub(crate) struct RecordLayer<F>(pub(crate) F);

impl<S, F> Layer<S> for RecordLayer<F>
where
    S: Subscriber + for<'span> LookupSpan<'span>,
    F: Fn(Record) + 'static,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(index) = context_index(attributes.metadata().name()) else {
            return;
        };
        let mut span_id = SpanId::default();
        attributes.record(&mut span_id);
        if let (Some(id), Some(span)) = (span_id.0, context.span(id)) {
            span.extensions_mut().insert(SpanContext {
                name_index: index,
                id,
            });
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = EventFields::default();
        event.record(&mut fields);
        // The event's own id has priority over the ids of its spans, and an inner span has priority
        // over an outer span.
        for span in context.event_scope(event).into_iter().flatten() {
            if let Some(SpanContext {
                name_index: index,
                id,
            }) = span.extensions().get::<SpanContext>()
            {
                fields.context[*index].get_or_insert_with(|| id.clone());
            }
        }
        let EventFields {
            text,
            other_fields,
            context,
        } = fields;
        (self.0)(Record {
            level: *event.metadata().level(),
            target: event.metadata().target().to_string(),
            text: (text + &other_fields).trim_start().to_string(),
            context,
        });
    }
}

/// Runs `body` and returns the records of its events that the filter lets pass.
#[cfg(test)]
pub(crate) fn records_of(filter: crate::Filter, body: impl FnOnce()) -> Vec<Record> {
    let (record_sender, records) = std::sync::mpsc::channel();
    let send_record = move |record| record_sender.send(record).expect("the receiver exists");
    tracing::subscriber::with_default(crate::subscriber(filter, send_record), body);
    records.try_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Filter;

    #[test]
    fn line_names_the_migration_of_its_span() {
        let records = records_of(Filter::default(), || {
            let _in_span = tracing::info_span!("migration", id = %"m5").entered();
            let _other_span = tracing::info_span!("transfer", id = 7).entered();
            tracing::warn!("slow");
            tracing::info!("m5: sent");
            tracing::info!("m50: sent");
            tracing::info!(job = %"t40001", "paused");
            tracing::info!(
                migration = Some("m6"),
                checkpoint = None::<&str>,
                "received"
            );
        });
        let lines: Vec<String> = records.iter().map(Record::line).collect();
        assert_eq!(
            lines,
            [
                "slow (migration m5)",
                "m5: sent",
                "m50: sent (migration m5)",
                "paused (migration m5, job t40001)",
                "received (migration m6)",
            ]
        );
    }

    #[test]
    fn only_other_levels_than_info_have_a_prefix() {
        let records = records_of(Filter::default(), || {
            tracing::error!("a");
            tracing::warn!("b");
            tracing::info!("c");
        });
        let lines: Vec<String> = records
            .iter()
            .map(|record| format!("{}{}", record.level_prefix(), record.line()))
            .collect();
        assert_eq!(lines, ["error: a", "warning: b", "c"]);
    }

    /// Fields that are not ids follow the text; the target is the module.
    #[test]
    fn other_fields_follow_the_text() {
        let records = records_of(Filter::default(), || tracing::info!(bytes = 5, "sent"));
        assert_eq!(records[0].line(), "sent bytes=5");
        assert_eq!(records[0].target, "sempa_logging::record::tests");
    }
}
