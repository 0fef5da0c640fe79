{{- define "tritandem.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "tritandem.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tritandem.labels" -}}
{{ include "tritandem.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "tritandem.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "tritandem.name" .) .Values.serviceAccount.name }}
{{- else }}{{ default "default" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{/* How many sources of a model are given: one is right. */}}
{{- define "tritandem.checkModel" -}}
{{- $given := 0 }}
{{- range list .Values.model.existingClaim .Values.model.hostPath .Values.model.name }}
{{- if . }}{{ $given = add1 $given }}{{ end }}
{{- end }}
{{- if ne (int $given) 1 }}
{{- fail "set exactly one of model.existingClaim, model.hostPath and model.name" }}
{{- end }}
{{- end }}
