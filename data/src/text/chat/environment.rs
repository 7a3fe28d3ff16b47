//! Jinja as chat templates expect it: Python's string methods, and the functions that Hugging Face adds.

use minijinja::{
    Environment, Error, ErrorKind,
    syntax::SyntaxConfig,
    value::{Kwargs, Value},
};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// Name of the one template.
pub(super) const NAME: &str = "chat_template";

/// Instructions that a template may execute for a conversation: some seconds, and a thousand times what any needs.
const FUEL: u64 = 20_000_000;

/// Compiles a template.
pub(super) fn compile(template: String) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()?;
    environment.set_syntax(syntax);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", tojson);
    environment.add_template_owned(NAME, template)?;
    Ok(environment)
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// The day is always 26 July 2024, the one that Llama 3's templates fall back to: the same file must be the same
/// tokens tomorrow, or a job could not resume.
fn strftime_now(format: &str) -> Result<String, Error> {
    let mut date = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            date.push(character);
            continue;
        }
        date.push_str(match characters.next() {
            Some('d') => "26",
            Some('b' | 'h') => "Jul",
            Some('B') => "July",
            Some('m') => "07",
            Some('Y') => "2024",
            Some('y') => "24",
            Some('a') => "Fri",
            Some('A') => "Friday",
            Some('j') => "208",
            Some('F') => "2024-07-26",
            Some('D') => "07/26/24",
            Some('H' | 'I' | 'M' | 'S') => "00",
            Some('T') => "00:00:00",
            Some('p') => "AM",
            Some('Z') => "UTC",
            Some('%') => "%",
            other => {
                let code = other.map(String::from).unwrap_or_default();
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("strftime_now does not know %{code}"),
                ));
            }
        });
    }
    Ok(date)
}

/// JSON as Python's `json.dumps(value, ensure_ascii=False)` writes it: Jinja's own escapes HTML.
fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let text = match indent {
        None => written(value, PythonFormatter)?,
        Some(indent) => {
            let indent = " ".repeat(indent);
            written(value, PrettyFormatter::with_indent(indent.as_bytes()))?
        }
    };
    Ok(Value::from_safe_string(text))
}

fn written(value: &Value, formatter: impl Formatter) -> Result<String, Error> {
    let bad = |cause: String| Error::new(ErrorKind::BadSerialization, cause);
    let mut bytes = Vec::new();
    value
        .serialize(&mut Serializer::with_formatter(&mut bytes, formatter))
        .map_err(|cause| bad(cause.to_string()))?;
    String::from_utf8(bytes).map_err(|cause| bad(cause.to_string()))
}

/// Separators `", "` and `": "`.
struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first {
            Ok(())
        } else {
            writer.write_all(b", ")
        }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first {
            Ok(())
        } else {
            writer.write_all(b", ")
        }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}
