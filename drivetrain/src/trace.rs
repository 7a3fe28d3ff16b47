//! A timeline of chosen steps, as Chrome's trace format has it: <https://ui.perfetto.dev> opens it.
//!
//! A process a rank; in it a row of what the rank's thread does (steps, their phases, units of the model, and the time
//! it spends in a collective operation), a row an operation from its start to the end of its wait, and counters of
//! memory. Where an operation's row is longer than the thread's part in it, communication went on beside computation.

use std::{
    cell::Cell,
    fmt,
    path::Path,
    str::FromStr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use drivetrain_core::{Result, files::write_atomic};
use serde_json::{Map, Value, json};
use tracing::{
    Event, Metadata, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id},
};
use tracing_subscriber::{
    Layer,
    filter::filter_fn,
    layer::{Context, Filter},
    registry::LookupSpan,
};

const STEP: &str = "drivetrain::step";
const PHASE: &str = "drivetrain::phase";
const COMPUTE: &str = "drivetrain::compute";
const COLLECTIVE: &str = "drivetrain::collective";
const MEMORY: &str = "drivetrain::memory";

thread_local! {
    /// The rank whose chosen step this thread is making.
    static RANK: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Steps to look at, such as `3` or `2,10-12`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepRanges(Vec<std::ops::RangeInclusive<u64>>);

impl StepRanges {
    fn contains(&self, step: u64) -> bool {
        self.0.iter().any(|range| range.contains(&step))
    }
}

impl FromStr for StepRanges {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
            (0 < first && first <= last).then_some(first..=last)
        };
        let ranges: Option<Vec<_>> = text.split(',').map(range).collect();
        ranges
            .map(Self)
            .ok_or_else(|| "steps from 1 on are wanted, such as `3` or `2,10-12`".to_owned())
    }
}

/// What was seen of the chosen steps.
pub struct Trace {
    steps: StepRanges,
    began: Instant,
    /// Microseconds since 1970 at `began`, so that timelines of several processes fit together.
    epoch: f64,
    next: AtomicU64,
    events: Mutex<Vec<Value>>,
}

impl Trace {
    /// Nothing yet, of these steps.
    pub fn new(steps: StepRanges) -> Arc<Self> {
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH);
        Arc::new(Self {
            steps,
            began: Instant::now(),
            epoch: epoch.unwrap_or_default().as_secs_f64() * 1e6,
            next: AtomicU64::new(1),
            events: Mutex::default(),
        })
    }

    /// What listens, to be added to the process's subscriber.
    pub fn layer<S>(self: &Arc<Self>) -> impl Layer<S> + use<S>
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
    {
        let listener = Listener(Arc::clone(self));
        let ours = |meta: &Metadata<'_>| {
            [STEP, PHASE, COMPUTE, COLLECTIVE, MEMORY].contains(&meta.target())
        };
        let filter: Box<dyn Filter<S> + Send + Sync> = Box::new(filter_fn(ours));
        listener.with_filter(filter)
    }

    /// Writes what was seen so far.
    ///
    /// # Errors
    /// `File` naming the path.
    pub fn write(&self, path: &Path) -> Result<()> {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let mut ranks: Vec<u64> = events.iter().filter_map(|e| e["pid"].as_u64()).collect();
        ranks.sort_unstable();
        ranks.dedup();
        let names = ranks.iter().flat_map(|rank| {
            let name = |what: &str, name: String| {
                json!({ "ph": "M", "name": what, "pid": rank, "tid": 0, "args": { "name": name } })
            };
            [
                name("process_name", format!("rank {rank}")),
                name("thread_name", "computes and waits".to_owned()),
            ]
        });
        let all: Vec<Value> = names.chain(events.iter().cloned()).collect();
        let file = json!({ "displayTimeUnit": "ms", "traceEvents": all });
        write_atomic(path, file.to_string().as_bytes())
    }

    fn now(&self) -> f64 {
        self.epoch + self.began.elapsed().as_secs_f64() * 1e6
    }

    fn push(&self, event: Value) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.push(event);
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trace")
            .field("steps", &self.steps)
            .finish_non_exhaustive()
    }
}

struct Listener(Arc<Trace>);

/// A span of a chosen step.
struct Seen {
    name: String,
    category: &'static str,
    rank: u64,
    args: Map<String, Value>,
    /// Of a collective operation.
    operation: Option<u64>,
    entered: f64,
}

impl Seen {
    fn event(&self, phase: &str, at: f64) -> Value {
        json!({
            "ph": phase, "name": self.name, "cat": self.category, "ts": at, "pid": self.rank, "tid": 0,
            "args": self.args,
        })
    }

    /// The begin or the end of an operation.
    fn of_operation(&self, phase: &str, at: f64) -> Option<Value> {
        let mut event = self.event(phase, at);
        event["id"] = format!("{:#x}", self.operation?).into();
        Some(event)
    }
}

impl<S> Layer<S> for Listener
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let target = attributes.metadata().target();
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let mut args = fields.0;
        let number = |args: &Map<String, Value>, key: &str| args.get(key).and_then(Value::as_u64);
        let rank = match target {
            STEP => number(&args, "step")
                .filter(|step| self.0.steps.contains(*step))
                .and_then(|_| number(&args, "rank")),
            _ => RANK.get(),
        };
        let (Some(rank), Some(span)) = (rank, context.span(id)) else {
            return;
        };
        let mut text = |key: &str| match args.shift_remove(key) {
            Some(Value::String(text)) => text,
            Some(other) => other.to_string(),
            None => String::new(),
        };
        let (name, category) = match target {
            STEP => (format!("step {}", text("step")), "step"),
            PHASE => (text("what"), "phase"),
            COLLECTIVE => (
                format!("{} {}", text("operation"), text("group")),
                "collective",
            ),
            _ => (
                format!("{} {}", text("what"), text("layer"))
                    .trim_end()
                    .to_owned(),
                "compute",
            ),
        };
        let operation = (target == COLLECTIVE).then(|| self.0.next.fetch_add(1, Ordering::Relaxed));
        let seen = Seen {
            name,
            category,
            rank,
            args,
            operation,
            entered: 0.0,
        };
        if let Some(event) = seen.of_operation("b", self.0.now()) {
            self.0.push(event);
        }
        span.extensions_mut().insert(seen);
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(seen) = span.extensions_mut().get_mut::<Seen>() {
            if seen.category == "step" {
                RANK.set(Some(seen.rank));
            }
            seen.entered = self.0.now();
        }
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(seen) = span.extensions().get::<Seen>() {
            if seen.category == "step" {
                RANK.set(None);
            } else if RANK.get().is_none() {
                // The wait, in another step, for what began in a chosen one: its own end tells of it.
                return;
            }
            let mut event = seen.event("X", seen.entered);
            event["dur"] = (self.0.now() - seen.entered).into();
            self.0.push(event);
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else {
            return;
        };
        if let Some(seen) = span.extensions().get::<Seen>()
            && let Some(event) = seen.of_operation("e", self.0.now())
        {
            self.0.push(event);
        }
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let Some(rank) = RANK.get().filter(|_| event.metadata().target() == MEMORY) else {
            return;
        };
        let mut fields = Fields::default();
        event.record(&mut fields);
        let resident = fields.0.shift_remove("resident");
        let at = self.0.now();
        // Counters of one name are stacked: what the engine holds is part of what is resident.
        for (name, args) in [
            ("memory of the engine", Value::Object(fields.0)),
            ("memory of the process", json!({ "resident": resident })),
        ] {
            self.0.push(
                json!({ "ph": "C", "name": name, "ts": at, "pid": rank, "tid": 0, "args": args }),
            );
        }
    }
}

/// A span's or an event's fields.
#[derive(Default)]
struct Fields(Map<String, Value>);

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?}");
        self.0.insert(field.name().to_owned(), text.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_read_or_refused() {
        let steps: StepRanges = "2, 10-12".parse().unwrap();
        let chosen: Vec<u64> = (0..20).filter(|step| steps.contains(*step)).collect();
        assert_eq!(chosen, [2, 10, 11, 12]);
        for text in [
            "",
            "0",
            "3-2",
            "x",
            "1,",
            "-1",
            "1-",
            "18446744073709551616",
        ] {
            assert!(text.parse::<StepRanges>().is_err(), "{text}");
        }
    }
}
